/* manifest.json: what makes a checkpoint directory complete. Written last, inside the temporary
 * directory that is then renamed to <job.dir>/checkpoints/<name>_step<N>.
 *
 *   { "format": 1, "name": "emoji", "step": 500, "next_n": 8000, "seed": 0, "plan_hash": "0123...",
 *     "lineage": "0123...", "isa": "avx512", "ranks": 2, "threads": 1, "fingerprint": "...", "optimizer_steps": 500,
 *     "skipped": 0, "loss_scale": 1, "loss_scale_steps": 0, "lr_steps": 1000, "data": [ {"first": 0, "epoch": 0, "items": 3655, "hash": "0123..."} ],
 *     "files": [ {"path": "model/config.json", "bytes": 1, "xxh3": "0123..."} ] }
 *
 * Hashes are XXH3-64 in 16 hex digits; a seed of more than 15 digits is a text. */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include "config/data_set.h"

enum { LG_MANIFEST_FILES_MAX = 64 };

struct lg_manifest_file {
    char path[256]; /* relative to the checkpoint, no ".." */
    uint64_t bytes, hash;
};
typedef struct lg_manifest {
    char name[128];
    uint64_t step;   /* committed steps */
    uint64_t next_n; /* first sample that was not trained */
    uint64_t seed, plan_hash;
    uint64_t lineage; /* config/lineage.h; 0: of a build that did not know lineages */
    char isa[16];
    int ranks, threads;
    char fingerprint[512];
    uint64_t optimizer_steps;              /* Adam's t */
    uint64_t skipped;                      /* steps skipped as not finite */
    uint64_t loss_scale, loss_scale_steps; /* 0: of a build that did not know */
    uint64_t lr_steps;                     /* length of the learning rate's schedule; 0: the same */
    struct lg_data_part data[LG_DATA_PARTS_MAX];
    int n_data; /* 0: of a build that did not know */
    struct lg_manifest_file file[LG_MANIFEST_FILES_MAX];
    int n_files;
} lg_manifest;

/* Hashes RUN-relative file dir/path and appends its row. */
int lg_manifest_add(lg_manifest *m, const char *dir, const char *path);
/* Publishes dir/manifest.json. */
int lg_manifest_save(const lg_manifest *m, const char *dir);
/* Reads dir/manifest.json. One that lists no file is LG_ERR_CORRUPT. */
int lg_manifest_read(const char *dir, lg_manifest *ret);
/* Moreover checks that every file exists with its size (cheap completeness). */
int lg_manifest_load(const char *dir, lg_manifest *ret);
/* Were both made by one run, or by a run and one that went on from it? The same lineage; where one of them
 * knows none, the same name and plan. */
bool lg_manifest_same_run(const lg_manifest *a, const lg_manifest *b);
/* Is `newer` trained on what `older` was trained on up to there? Where one of them does not know: yes. */
bool lg_manifest_same_data(const lg_manifest *older, const lg_manifest *newer);
/* Reads every file again and compares the hashes. The message names the first that differs. */
int lg_manifest_verify(const lg_manifest *m, const char *dir);
/* The newest complete checkpoint <checkpoints_dir>/<name>_step<N>: the largest N whose manifest
 * loads. LG_ERR_NOTFOUND when there is none. Incomplete ones are passed over; one that cannot be read
 * (LG_ERR_IO, LG_ERR_MISMATCH ...), or that is of another step than its name says, is not: nobody shall
 * go on from an older state unawares. */
int lg_manifest_newest(const char *checkpoints_dir, const char *name, char ret_dir[LG_PATH_BYTES],
                       lg_manifest *ret);
/* Is path a checkpoint directory (holds a manifest.json)? */
bool lg_manifest_exists(const char *dir);
/* N of "<name>_step<N>" as a checkpoint of this name is called; false: it is called otherwise
 * ("_step01" is somebody else's). */
bool lg_checkpoint_step(const char *entry, const char *name, uint64_t *ret_step);
/* Removes what a writer of checkpoints of this name that died has left: one half written
 * (".tmp-<name>_step<N>", or with ".<writer>" behind it) or half removed (".old-..."), of steps up to `upto`. Only while
 * nobody else writes such there. What cannot be removed stays for the next time; no directory, nothing to do. */
void lg_manifest_remove_leftovers(const char *checkpoints_dir, const char *name, uint64_t upto);
/* Folder of the weights inside `dir`: dir itself when it is a diffusers folder, dir/ema or
 * dir/model when it is a checkpoint (which: "model" or "ema"). LG_ERR_NOTFOUND says what was looked
 * for. */
int lg_checkpoint_weights_dir(const char *dir, const char *which, char ret[LG_PATH_BYTES]);
