/* The crash campaign's driver; README.md says what it proves. One campaign is a row of runs; one run
 * is `lgsup start` of a pipeline to its end while faults fall on it, and then a comparison with an
 * undisturbed run. Each run is a process of its own, forked from the campaign, and hands back one
 * line of JSON, its record. */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include "shm/board.h"
#include "tests/chaos/shim.h"
#include <cjson/cJSON.h>

typedef enum chaos_fault {
#define FAULT(name, cards, doc) CHAOS_##name,
#include "tests/chaos/faults.def"
#undef FAULT
    CHAOS_FAULTS
} chaos_fault;
extern const char *const chaos_fault_name[CHAOS_FAULTS];
extern const char *const chaos_fault_doc[CHAOS_FAULTS];

#ifdef __SANITIZE_ADDRESS__ /* a build with SAN=address: its programs are watched by ASan and UBSan */
#define CHAOS_SANITIZED true
#else
#define CHAOS_SANITIZED false
#endif

enum { CHAOS_EVENTS_MAX = 4096, CHAOS_CHILD_MS_MAX = 60000 };

/* What a campaign is told. Paths are absolute. */
struct chaos_options {
    char bin[LG_PATH_BYTES];         /* BUILD/bin */
    char tools[LG_PATH_BYTES];       /* BUILD/tests/chaos: shim and ledger_check */
    char pipeline[LG_PATH_BYTES];    /* a pipeline.toml */
    char home[LG_PATH_BYTES];        /* records, reference, runs */
    const char *commit, *tar, *only; /* tar: shard for the ledger's keys; only: one fault's name */
    uint64_t seed;
    int64_t kills, steps, jobs, gap_ms, seconds_max;
    int64_t batch, data_seed; /* of the pipeline */
    char name[64];            /* job.name */
};

/* One death or other fault, and how long until the run had forgotten it. */
struct chaos_event {
    chaos_fault fault;
    int role, index;
    int64_t at_ns;
    lg_mark commit;                       /* global, at the fault */
    uint64_t run_id;                      /* of the board then */
    lg_incarnation incarnation;           /* of what was killed, 0: nothing was */
    double commit_ms, ready_ms, adopt_ms; /* -1: not (yet) */
    bool waits;                           /* for a commit or a replacement still */
    bool killed;
    bool alone; /* nothing else fell before it was over */
};

/* ---- run.c: one run ---- */
struct chaos_run {
    const struct chaos_options *o;
    int64_t number;
    int slot; /* of the JOBS at a time */
    uint64_t seed, drawn;
    bool preload;
    char dir[LG_PATH_BYTES], runtime[LG_PATH_BYTES];
    struct chaos_control *control;
    /* lgsup */
    int pid, out_fd; /* pid 0: none now */
    bool killed_lgsup;
    int64_t started_ns, start_at_ns, spoke_ns;
    int starts, refused, refused_in_row; /* in a row: no step was committed in between */
    bool done;
    /* the board */
    lg_board *board;
    uint64_t board_inode;
    lg_mark commit;
    int64_t progress_ns;
    int role_kills[LG_ROLE_COUNT]; /* since the last commit */
    /* faults */
    uint8_t deck[512];
    int cards, card;
    int64_t next_ns, calm_ns;
    int overlap;    /* faults on top of one another just now */
    int stopped_fd; /* pidfd of a paused process, -1: none */
    int64_t continue_ns, disk_ns;
    uint32_t armed; /* index + 1 of the site that is to fail */
    int64_t armed_ns;
    int armed_kills; /* what was done so that somebody reaches the site */
    struct chaos_event event[CHAOS_EVENTS_MAX];
    int n_events;
    int64_t count[CHAOS_FAULTS], kills, sites_failed, sites_missed, garbage;
    char why[512]; /* "": all is well */
};
/* Runs number `n` to its end and returns its record. Never fails: what goes wrong stands in it. */
cJSON *chaos_run(const struct chaos_options *o, int64_t n, int slot);
/* An undisturbed run in `dir`, keeping every checkpoint. */
int chaos_reference(const struct chaos_options *o, const char *dir);
uint32_t chaos_draw(struct chaos_run *r, uint32_t below);
void chaos_fail(struct chaos_run *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void chaos_start_lgsup(struct chaos_run *r);

/* ---- chaos.c ---- */
bool chaos_interrupted(void);

/* ---- faults.c ---- */
void chaos_shuffle(struct chaos_run *r);
/* Draws a card and does it. False: not possible at this moment. */
bool chaos_strike(struct chaos_run *r, int64_t now_ns);
/* Arms a site of which little is known yet (shim.h). False: none is known at all. */
bool chaos_arm(struct chaos_run *r, int64_t now_ns);
/* Ends what lasts: a full disk, a stopped process, an armed call. */
void chaos_follow(struct chaos_run *r, int64_t now_ns);
/* Is something still going on that the run must first get over? */
bool chaos_lasts(const struct chaos_run *r);

/* ---- garbage.c ---- */
void chaos_garbage(struct chaos_run *r);

/* ---- compare.c ---- */
/* Compares a finished run with the reference: checkpoints, ledger, metrics, `lgsup verify`. 0, or -1
 * with the first difference in `why`. */
int chaos_compare(const struct chaos_options *o, const char *run, const char *reference, char *why,
                  size_t bytes);
/* Runs a program to its end, output to `log`; its exit code, -1 when it was killed. */
int chaos_execute(char *const *argv, const char *log, int64_t ms_max);

/* ---- report.c ---- */
/* Writes the report of the records in each home. */
int chaos_report(const char *path, char *const *homes, int n_homes);
