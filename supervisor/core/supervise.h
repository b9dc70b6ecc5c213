/* The supervisor of one run: starts every process, restarts what dies, ends the run.
 *
 * What happens when stands in states.def; this file has the data, supervise.c the one poll loop,
 * watch.c the looks at the board that raise events, run_actions.c and instance_actions.c what is
 * done. Nothing here computes or touches a region's contents.
 *
 * The loop and all of its data belong to one thread, which never waits for a terminal, a disk, a
 * keeper or a service manager: what may block is given to workers as jobs (background.h), and what
 * follows from a job is done by the loop when it collects the result. So a stage that dies is started
 * again within milliseconds, and a stop is obeyed, whatever hangs. */
#pragma once
#include "bus/control.h"
#include "shm/board.h"
#include "supervisor/core/background.h"
#include "supervisor/core/intensity.h"
#include "supervisor/core/keep.h"
#include "supervisor/hosts/cluster.h"
#include "supervisor/launch/launcher.h"
#include "supervisor/run/child.h"
#include "supervisor/run/programs.h"
#include "supervisor/run/run.h"
#include "supervisor/views/extras.h"
#include "supervisor/views/progress.h"

#define LG_RUN_STATES(X) X(starting) X(running) X(draining) X(leaving) X(killing) X(over)
#define LG_RUN_EVENTS(X)                                                                           \
    X(all_ready) X(complete) X(stop) X(interrupt) X(crash_loop) X(lost) X(overdue) X(all_gone)
#define LG_INSTANCE_STATES(X)                                                                      \
    X(down) X(starting) X(ready) X(doomed) X(resting) X(yielding) X(draining) X(leaving) X(absent)
#define LG_INSTANCE_EVENTS(X) X(start) X(ready) X(died) X(left) X(late) X(yield) X(drain) X(leave)

typedef enum lg_run_step {
#define X(name) LG_RUN_STEP_##name,
    LG_RUN_STATES(X)
#undef X
        LG_RUN_STEP_COUNT
} lg_run_step;

typedef enum lg_run_event {
#define X(name) LG_RUN_EVENT_##name,
    LG_RUN_EVENTS(X)
#undef X
        LG_RUN_EVENT_COUNT
} lg_run_event;

typedef enum lg_instance_state {
#define X(name) LG_INSTANCE_##name,
    LG_INSTANCE_STATES(X)
#undef X
        LG_INSTANCE_STATE_COUNT
} lg_instance_state;

typedef enum lg_instance_event {
#define X(name) LG_INSTANCE_EVENT_##name,
    LG_INSTANCE_EVENTS(X)
#undef X
        LG_INSTANCE_EVENT_COUNT
} lg_instance_event;

struct lg_instance {
    lg_role role;
    int index;
    lg_instance_state state;
    lg_incarnation incarnation;
    struct lg_child child;
    int64_t spawned_ns;
    int64_t retry_ns;  /* down: not before this */
    int early_deaths;  /* in a row, before being ready */
    int late_looks;    /* in a row */
    bool late;         /* its process has been killed for that */
    int64_t killed_ns; /* when SIGKILL was sent to its process; 0: it was not */
    bool stuck;        /* killed long ago, and said to be still there */
    struct lg_failures failures;
    int exit_code;              /* of the last process, LG_EXIT_* */
    lg_incarnation was_standby; /* its process was a standby under this one, in a spare row; 0 */
    bool excused;               /* its next death is lgsup's own doing, or the keeper's */
    char said[LG_CAUSE_BYTES];  /* its last error event */
    int64_t log_bytes;          /* of its log before its process began; 0: not known */
};
enum { LG_INSTANCE_TABLE = LG_ROLE_keeper * LG_INSTANCES_MAX };

typedef struct lg_supervisor {
    lg_run *run;
    lg_board *board;
    const struct lg_launcher *launcher; /* of the run */
    lg_cluster *cluster;                /* NULL: the run has one host; the caller's */
    lg_control *control;
    lg_keep keep;
    lg_progress progress;
    lg_extras *extras; /* the views' worker's; NULL: none are wanted */
    bool view_waits;   /* it looks at them */
    int64_t next_view_ns;
    lg_run_step step;
    lg_run_state outcome; /* of the end: done, stopped, parked or failed */
    int exit_code;        /* of lgsup: an lg_err negated, or 130 */
    char cause[LG_CAUSE_BYTES];
    bool announced;
    bool copies_due;    /* a stage has finished its setup, or the keeper is another */
    bool copies_asked;  /* they are being made */
    bool copies_failed; /* has been said */
    bool keeps_memory;  /* parked: the keeper stays */
    bool asks_keeper;   /* parked: whether it has all of the memory is not known yet */
    struct lg_background background;
    bool keep_look_waits; /* a look at the keeper is under way */
    /* Since when there is this keeper; INT64_MAX: there is none, or it was found to hang. */
    int64_t keeper_since_ns;
    int ready_fd; /* gets one byte 0 when every role is ready; -1; the caller's */
    int signal_fd;
    int64_t last_sockets_look_ns;
    int64_t
        sockets_since_ns; /* since when they are all there again; 0: always; INT64_MAX: they are not */
    int sockets_missing; /* looks in a row at which the keeper's was not there */
    bool sockets_wait;   /* their directory is being made again */
    bool sockets_failed; /* they cannot be made again: was said */
    int64_t leave_by_ns, last_hang_look_ns, last_status_ns;
    int64_t interrupted_ns; /* the last interrupt that counted; 0: none */
    struct lg_intensity intensity[LG_ROLE_COUNT];
    struct lg_instance *instance; /* (LG_INSTANCE_TABLE), in the order of role and index */
    int n_instances;
    lg_programs programs;
    struct lg_swap *swap;                     /* NULL: none under way */
    uint64_t last_swap;                       /* its id, or that of the last one */
    struct lg_peer scale_peer[LG_ROLE_COUNT]; /* who waits for an answer; bytes 0: nobody */
    uint64_t scale_order[LG_ROLE_COUNT];      /* counts the orders: the last one */
    bool scale_waits[LG_ROLE_COUNT];          /* for the launcher, before anything is done for it */
} lg_supervisor;

struct lg_supervise_spec {
    lg_run *run;         /* locked, with config, plan, runtime directory */
    lg_board *board;     /* created, or opened again */
    bool adopt;          /* take over what an earlier lgsup has left */
    bool parked;         /* adopt: of a run that was parked, whose lgsup has ended in order */
    bool drain;          /* end it at once, in order (`lgsup stop` of an orphaned run) */
    lg_cluster *cluster; /* of several hosts; NULL: there is one */
    int ready_fd;        /* -1: nobody asks */
    bool quiet;          /* no progress on the terminal: only logs/lgsup.log */
};
/* Runs until the run is over. LG_ERR_NOTFOUND with adopt: see lg_adopt_instances. *ret_exit: 0, 11 (parked), 130 (interrupted twice) ...; *ret_outcome
 * what the status says from now on. SIGINT, SIGTERM and SIGHUP are blocked on return. */
int lg_supervise(const struct lg_supervise_spec *spec, int *ret_exit, lg_run_state *ret_outcome);

/* ---- between the files of the supervisor ---- */
void lg_run_raise(lg_supervisor *s, lg_run_event e);
void lg_instance_raise(lg_supervisor *s, struct lg_instance *i, lg_instance_event e);

/* watch.c: looks at the board and raises what follows from it. */
void lg_watch_look(lg_supervisor *s);
/* sockets.c: once a second, are the sockets there? What was removed is made again. */
void lg_sockets_look(lg_supervisor *s);
/* Was one of lgsup's or the keeper's missing at some time after since_ns, as far as is known? Looks now,
 * too. Who sets up meanwhile cannot help failing. */
bool lg_sockets_were_lost(lg_supervisor *s, int64_t since_ns);
/* adopt.c. Does a process of this board live (lgsup aside)? */
bool lg_leftovers_live(lg_board *b);
/* Kills them all and waits for their end. keeper: it as well, unless it is a service. */
void lg_leftovers_kill(lg_board *b, bool keeper);
/* Turns the rows of an earlier lgsup into instances. LG_ERR_NOTFOUND when memory has been lost: the
 * processes that live cannot go on, and a new start is needed. */
int lg_adopt_instances(lg_supervisor *s, bool parked);
/* SIGKILL to its process, which is watched for its end from then on. */
void lg_instance_sigkill(struct lg_instance *i);
/* "vae.1" */
void lg_instance_name(const struct lg_instance *i, char ret[32]);
int lg_instance_log(const lg_supervisor *s, const struct lg_instance *i, char ret[LG_PATH_BYTES]);
/* other_hosts.c: what the other hosts do. */
void lg_cluster_look(lg_supervisor *s);
/* The operator's word. */
void lg_cluster_on_take(lg_supervisor *s, struct lg_message *ret_answer);
/* All is done here: may the processes leave, or does another host still need them? */
bool lg_cluster_lets_go(lg_supervisor *s);
/* Every stage looks at the board now. */
void lg_nudge_all(lg_supervisor *s);
/* What stages and commands have sent. */
void lg_control_handle(lg_supervisor *s);
/* Likewise one message. */
void lg_control_message(lg_supervisor *s, const struct lg_peer *peer, const struct lg_message *m);
/* To a command here, or on another host. */
void lg_supervisor_answer(lg_supervisor *s, const struct lg_peer *peer, const struct lg_message *m);

#define LG_RUN_RULE(state, event, action, next) void lg_run_##action(lg_supervisor *s);
#define LG_INSTANCE_RULE(state, event, action, next)                                               \
    void lg_instance_##action(lg_supervisor *s, struct lg_instance *i);
#include "supervisor/core/states.def"
#undef LG_RUN_RULE
#undef LG_INSTANCE_RULE
