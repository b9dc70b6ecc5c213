/* A run directory, seen from lgsup: its lock, its runtime directory, what a start continues from.
 *
 *   DIR/lock         flock of the lgsup in charge; "PID START_TIME BOOT_ID HOST" of it
 *   DIR/runtime      path of the runtime directory (sockets), while the run lives
 *   DIR/config.toml  effective config       DIR/plan.json  the plan       DIR/board  the board
 *   DIR/systemd      prefix of the systemd units that the run belongs to; missing: to none
 *   DIR/lineage      id of the lineage that the files belong to (config/lineage.h), 16 hex digits
 *   DIR/waiting      for what lgsup waits before the run begins here (waiting.h)
 *   DIR/resume       path of the checkpoint that this start continues from, or empty
 *   DIR/status.json  last status, for after the end
 *   DIR/logs/ROLE.INDEX.log, DIR/logs/lgsup.log
 *   metrics.jsonl, ledger, checkpoints/, samples/: written by the stages
 */
#pragma once
#include "base/fs.h"
#include "config/data_set.h"
#include "config/plan.h"

enum { LG_UNITS_BYTES = 64 };

typedef struct lg_run {
    char dir[LG_PATH_BYTES];         /* absolute */
    char runtime_dir[LG_PATH_BYTES]; /* "" until lg_run_runtime */
    int lock_fd;                     /* -1: not held */
    char units[LG_UNITS_BYTES];      /* prefix of our own systemd units; "": lgsup starts all */
    lg_config *config;               /* owned */
    lg_plan plan;
    char resume[LG_PATH_BYTES];                  /* checkpoint to continue from, or "" */
    uint64_t start_step;                         /* its step, or 0 */
    uint64_t lineage;                            /* of the run that goes on, or of the new one */
    struct lg_data_part data[LG_DATA_PARTS_MAX]; /* what it was trained on */
    int n_data;
    bool
        follows; /* of several hosts, and not the one that led last: what is made of checkpoints it makes */
    bool memory_lost; /* lg_supervise has failed for it: only a checkpoint can be gone on from */
} lg_run;

/* An lg_run without anything in it; close it with lg_run_close. */
void lg_run_init(lg_run *r, const char *dir);
/* Releases memory and the lock. Files stay. */
void lg_run_close(lg_run *r);

/* Creates DIR with its folders. A clear message when it cannot be written. Before the lock: r holds nothing
 * but its path afterwards. */
int lg_run_create(lg_run *r);
/* Its folders alone, of a run that is in use. */
int lg_run_make_folders(const lg_run *r);
/* Where hosts share their checkpoints, and `config` says so: DIR/checkpoints is a link to the folder that all see, which is
 * made. LG_ERR_CONFIG: DIR/checkpoints has files of its own. */
int lg_run_share_checkpoints(const lg_run *r, const lg_config *config);
/* Before the processes start and after they have ended: what a writer that died, or whose removals failed, has left in
 * DIR/checkpoints goes; what cannot be removed stays for the next start. Where hosts share the folder others may be
 * writing, and the next writer does it (stages/ckpt/retention.h). */
void lg_run_remove_leftovers(const lg_run *r);
/* Takes the lock and records us in it. LG_ERR_BUSY when a living lgsup holds it. An earlier holder
 * that died is waited for: its end is certain only when its pidfd says so; and so is a child of it
 * that has a copy of the lock because it is no other program yet; one that was stopped is killed. */
int lg_run_lock(lg_run *r);
/* Pidfd of the lgsup that is recorded in DIR/lock; -1 when it is gone, or has another directory, of which this one is a
 * copy. *ret_pid may be NULL. */
int lg_run_holder(const char *dir, int *ret_pid);

/* DIR/config.toml and DIR/plan.json, for an adoption or for reading. */
int lg_run_load(lg_run *r);
/* Takes `config` over and decides what this start continues from: the newest complete checkpoint in
 * DIR (trainer.auto_resume), else trainer.resume_from, else nothing. Then makes the plan. Refuses
 * by name a key that would change the result of what is continued. */
int lg_run_decide(lg_run *r, lg_config *config);
/* Writes config.toml and plan.json. */
int lg_run_save_config(const lg_run *r);
/* Writes these, resume and lineage. */
int lg_run_save(const lg_run *r);

/* A new runtime directory, mode 0700, short enough for socket paths; recorded in DIR/runtime. */
int lg_run_runtime_create(lg_run *r);
/* Records `dir`, which systemd has made; LG_ERR_CONFIG when it is NULL or no such path. */
int lg_run_runtime_use(lg_run *r, const char *dir);
/* The recorded one. LG_ERR_NOTFOUND. LG_ERR_IO when it is not ours alone (owner, mode 0700). */
int lg_run_runtime_load(lg_run *r);
/* The recorded one, for a run whose processes may live: made again when it was removed, at the same path;
 * where that cannot be and may_move, another one, recorded. Stages follow by the board's sockets_epoch. */
int lg_run_runtime_restore(lg_run *r, bool may_move);
/* Removes it with its record, if lg_run_runtime_create has made it. */
void lg_run_runtime_remove(lg_run *r);
/* Removes the record alone. */
void lg_run_runtime_forget(lg_run *r);
/* 0: DIR is a run's. LG_ERR_NOTFOUND: it is none; LG_ERR_IO ...: it cannot be looked into. */
int lg_run_is_there(const char *dir);
/* "DIR/<rest>" */
int lg_run_path(const lg_run *r, char ret[LG_PATH_BYTES], const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* One line of a small text file, without its end. */
int lg_read_line(const char *path, char *ret, size_t bytes);
