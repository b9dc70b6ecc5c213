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
#define FAULT(name, kind, needs, cards, doc) CHAOS_##name,
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

enum { CHAOS_EVENTS_MAX = 4096, CHAOS_CHILD_MS_MAX = 60000, CHAOS_STOPPED_MAX = 512 };

/* What a campaign is told. Paths are absolute. */
struct chaos_options {
    char bin[LG_PATH_BYTES];         /* BUILD/bin */
    char tools[LG_PATH_BYTES];       /* BUILD/tests/chaos: shim and ledger_check */
    char pipeline[LG_PATH_BYTES];    /* a pipeline.toml */
    char home[LG_PATH_BYTES];        /* records, reference, runs */
    const char *commit, *tar, *only; /* tar: shard for the ledger's keys; only: one fault's name */
    uint64_t seed;
    int64_t kills, steps, jobs, gap_ms, seconds_max;
    int64_t batch, data_seed, every; /* of the pipeline */
    int64_t ranks, micro;            /* and of its plan: ranks with a share each, a micro-batch */
    char buckets[LG_BUCKETS_TEXT_BYTES]; /* "": none */
    bool has_modes;                      /* the settings of modes.def leave every bit as it is */
    char name[64];                       /* job.name */
    char data[LG_PATH_BYTES];            /* data.path, where that is a small folder; else "" */
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

struct chaos_victim {
    int role, index, pidfd;
    lg_incarnation incarnation;
};

/* A fault of several parts: its functions keep here what they have to remember. Between begin and over
 * nothing else falls. */
struct chaos_episode {
    bool on;
    bool takes_end; /* lgsup's end is this episode's matter: nobody starts it again */
    bool ended;     /* it has ended, with chaos_run.code */
    chaos_fault fault;
    int phase, todo;
    int64_t began_ns, until_ns; /* until: of this phase */
    lg_mark commit;             /* at its begin */
    uint64_t run_id;
    uint32_t restarts;
    struct chaos_victim victim; /* the last one */
    int instances[LG_ROLE_COUNT];
    int stopped[CHAOS_STOPPED_MAX], n_stopped; /* pidfds */
    lg_incarnation living[LG_ROWS];
    pid_t child; /* 0: none, or ended with child_code */
    int child_code;
};

/* New at each start that is not an adoption. */
static inline uint64_t chaos_run_id(const lg_board *b)
{
    return b->s->preamble.run_id;
}

/* ---- run.c: one run ---- */
struct chaos_run {
    const struct chaos_options *o;
    int64_t number;
    int slot; /* of the JOBS at a time */
    uint64_t seed, drawn;
    bool preload;
    char dir[LG_PATH_BYTES], runtime[LG_PATH_BYTES];
    char data[LG_PATH_BYTES]; /* its own copy of the data set; "": the pipeline's */
    int hang_s;               /* supervisor.hang_s */
    struct chaos_control *control;
    /* lgsup */
    int pid, out_fd; /* pid 0: none now */
    bool killed_lgsup, terminal, frozen;
    int code;                /* of its last end */
    int64_t said, said_from; /* bytes in DIR.out: all, and before this lgsup */
    int64_t started_ns, start_at_ns, spoke_ns;
    int starts, refused, refused_in_row; /* in a row: no step was committed in between */
    bool done;
    /* the board */
    lg_board *board;
    uint64_t board_inode;
    lg_mark commit, published;
    int64_t progress_ns;
    int role_kills[LG_ROLE_COUNT]; /* since the last commit */
    /* faults */
    uint8_t deck[512];
    int cards, card;
    int64_t next_ns, calm_ns;
    int overlap; /* faults on top of one another just now */
    int final_strikes;
    int stopped_fd; /* pidfd of a paused process, -1: none */
    int64_t continue_ns, disk_ns;
    uint32_t armed; /* index + 1 of the site that is to fail */
    int64_t armed_ns;
    int armed_kills; /* what was done so that somebody reaches the site */
    struct chaos_episode episode;
    char cgroup[LG_PATH_BYTES]; /* "": none */
    int cgroup_version;         /* 1: version 2; 0: version 1 */
    struct chaos_event event[CHAOS_EVENTS_MAX];
    int n_events;
    bool impossible[CHAOS_FAULTS];
    int64_t count[CHAOS_FAULTS], kills, oom_kills, sites_failed, sites_missed, garbage;
    int stops;     /* by `lgsup stop`: checkpoints of other steps than the reference's */
    char why[512]; /* "": all is well */
};
/* The run's settings of modes.def, in words. */
const char *chaos_mode(const struct chaos_run *r);
/* Runs number `n` to its end and returns its record. Never fails: what goes wrong stands in it. */
cJSON *chaos_run(const struct chaos_options *o, int64_t n, int slot);
/* An undisturbed run in `dir`, keeping every checkpoint; on `data` unless that is NULL. */
int chaos_undisturbed(const struct chaos_options *o, const char *dir, const char *data);
void chaos_fail(struct chaos_run *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Is the last step committed? How many are to come? Has the run got over everything so far? */
bool chaos_is_final(const struct chaos_run *r);
/* Has it published a checkpoint since it went back to one? What kills everything waits for that, or a
 * run would never get further. */
bool chaos_has_published(const struct chaos_run *r);
int64_t chaos_steps_left(const struct chaos_run *r);
bool chaos_is_calm(const struct chaos_run *r);
void chaos_look_for_board(struct chaos_run *r);

/* ---- lgsup.c: its start, its words, its end ---- */
void chaos_start_lgsup(struct chaos_run *r);
pid_t chaos_stop_lgsup(const struct chaos_run *r); /* `lgsup stop`, a child of ours */
void chaos_listen(struct chaos_run *r);
void chaos_freeze_terminal(struct chaos_run *r, bool frozen);
/* The first error that this lgsup has printed, or "". */
void chaos_first_error(const struct chaos_run *r, char *ret, size_t bytes);
void chaos_lgsup_ended(struct chaos_run *r, int status);

/* ---- processes.c ---- */
/* Of a role at most a few processes are killed between two commits. */
bool chaos_may_die(const struct chaos_run *r, int role);
/* False: no such process just now. Of a victim that is not killed the caller closes the pidfd. */
bool chaos_find_victim(struct chaos_run *r, int role, int index, struct chaos_victim *ret);
/* Any process that lives and may die, of the roles up to `last`. */
bool chaos_draw_victim(struct chaos_run *r, lg_role last, struct chaos_victim *ret);
int chaos_instances(struct chaos_run *r, int role);
struct chaos_event *chaos_note(struct chaos_run *r, chaos_fault f, int role, int index);
void chaos_kill_all(struct chaos_run *r, chaos_fault f, struct chaos_victim *v, int n);
/* Processes whose parent is `parent`; their number, at most `max`. */
int chaos_children(int parent, int *ret_pid, int max);

/* ---- chaos.c ---- */
bool chaos_interrupted(void);

/* ---- faults.c ---- */
uint32_t chaos_draw(struct chaos_run *r, uint32_t below);
/* Can this fault fall in this run, on this machine? */
bool chaos_is_possible(const struct chaos_run *r, chaos_fault f);
bool chaos_needs_shim(chaos_fault f);
bool chaos_strike_power(struct chaos_run *r, chaos_fault f);
void chaos_shuffle(struct chaos_run *r);
/* Draws a card and does it. False: not possible at this moment. */
bool chaos_strike(struct chaos_run *r, int64_t now_ns);
/* Arms a site of which little is known yet (shim.h). False: none is known at all. */
bool chaos_arm(struct chaos_run *r, int64_t now_ns);
/* Ends what lasts: a full disk, a stopped process, an armed call. */
void chaos_follow(struct chaos_run *r, int64_t now_ns);
/* Is something still going on that the run must first get over? */
bool chaos_lasts(const struct chaos_run *r);

/* ---- episodes.c ---- */
bool chaos_is_episode(chaos_fault f);
/* False: not possible at this moment. */
bool chaos_episode_begin(struct chaos_run *r, chaos_fault f, int64_t now_ns);
void chaos_episode_follow(struct chaos_run *r, int64_t now_ns);
void chaos_child_ended(struct chaos_run *r, int status);
/* For the episodes themselves: into the next phase, which may last so long; over; fails the run
 * with "<what> within S s" when this phase has lasted too long. */
void chaos_episode_next(struct chaos_run *r, int64_t now_ns, int64_t ms);
void chaos_episode_over(struct chaos_run *r);
bool chaos_episode_late(struct chaos_run *r, int64_t now_ns, const char *what);
/* Kills one process of the roles up to `last`; is its replacement ready? */
bool chaos_episode_kill(struct chaos_run *r, lg_role last);
bool chaos_episode_is_replaced(const struct chaos_run *r);
/* ---- stopped.c, files.c, machine.c ---- */
#define FAULT(name, kind, needs, cards, doc) kind(name)
#define STROKE(name)
#define EPISODE(name)                                                                              \
    bool chaos_begin_##name(struct chaos_run *r, int64_t now_ns);                                  \
    void chaos_follow_##name(struct chaos_run *r, int64_t now_ns);
#include "tests/chaos/faults.def"
#undef EPISODE
#undef STROKE
#undef FAULT
void chaos_set_clock(struct chaos_run *r);
/* A shard more, or a sample less. */
int chaos_change_data(const char *dir, bool add);
int chaos_restore_data(const struct chaos_run *r);
int chaos_copy(const char *from, const char *to);

/* ---- cgroup.c: the run's own control group ---- */
bool chaos_cgroup_open(struct chaos_run *r); /* false: not on this machine */
void chaos_cgroup_enter(const struct chaos_run *r);
void chaos_cgroup_close(struct chaos_run *r);
int chaos_cgroup_tighten(struct chaos_run *r);
void chaos_cgroup_loosen(struct chaos_run *r);
/* By the kernel, in this group, so far. */
uint32_t chaos_cgroup_kills(const struct chaos_run *r);
bool chaos_cgroup_has_killed(const struct chaos_run *r);

/* ---- garbage.c ---- */
void chaos_garbage(struct chaos_run *r);

/* ---- compare.c ---- */
/* Compares a finished run with the reference: checkpoints, ledger, metrics, `lgsup verify`. 0, or -1
 * with the first difference in `why`. */
int chaos_compare(const struct chaos_run *r, const char *reference, char *why, size_t bytes);
/* Every file of `a` is in `b`, the same, and no other. */
int chaos_same_tree(const char *a, const char *b, char *why, size_t bytes);
/* Runs a program to its end, output to `log`; its exit code, -1 when it was killed. */
int chaos_execute(char *const *argv, const char *log, int64_t ms_max);

/* ---- report.c ---- */
/* Writes the report of the records in each home; the text of the file `notes`, unless NULL, ends it. */
int chaos_report(const char *path, const char *notes, char *const *homes, int n_homes);
