/* The inside of the pretended machine (supervisor.h), shared by its files:
 *   machine_processes.c  the table of processes and what a stage does in its life
 *   machine_swaps.c      orders of `lgsup swap`, and what must hold before they are answered
 *   machine_memory.c     regions, who holds them, the keeper
 *   machine_calls.c      the system's calls
 *   machine_lgsup.c      lgsup's calls of its own modules: children, messages
 *   supervisor.c         what happens to the machine, and one run */
#pragma once
#include "base/clock.h"
#include "supervisor/core/supervise.h"
#include "tests/sim/supervisor.h"
#include "tests/sim/wrap.h"
#include "tests/unit/sim_world.h"
#include <setjmp.h>

enum {
    PROCS_MAX = 128,
    PID_FIRST = 2000,
    PIDFD_FIRST = 1 << 24,
    SIGNAL_FD = 1 << 22,
    CONTROL_FD,
    WAKE_FD, /* of lgsup's workers */
    STAT_FD, /* of the process g.stat_pid */
    MESSAGES_MAX = 64,
    ALLOCATIONS_MAX = 256,
    HANG_S = 3,
    READY_S = 4,
    LGSUP_DEATHS_MAX = 60,
    PROGRAMS_BYTES_MAX = 4096,
    REGION_VERSIONS_MAX = 1024
};

/* Memory: the window, the ranks' states and gradients, the EMA's, the staging region. */
enum { REGION_WINDOW, REGION_TRAINER, REGION_EMA, REGION_STAGING, REGIONS };

/* What a process may run; each has a file of that name. */
#define PROGRAMS(X)                                                                                \
    X(beside) /* the one that lgsup finds beside itself */                                         \
    X(new)    /* as good as the first */                                                           \
    X(newer)                                                                                       \
    X(other_layout) /* compiled with another board: exits before it joins */                       \
    X(exits)        /* before it is ready */                                                       \
    X(hangs)        /* before it is ready */                                                       \
    X(hangs_later)  /* having taken over, before it says that it is ready there */                 \
    X(dies_later)   /* the same, dead */                                                           \
    X(missing)      /* no such file */
enum program {
#define X(name) PROGRAM_##name,
    PROGRAMS(X)
#undef X
        PROGRAM_COUNT
};

/* STANDBY: ready beside the process whose row it is to take. TAKING: has been told so, and has left
 * the row where it was a standby. */
enum state { GONE, BORN, UP_SETUP, STANDBY, TAKING, UP_READY, ZOMBIE };

struct proc {
    uint32_t serial; /* its pidfd is PIDFD_FIRST + serial */
    enum state state;
    int pid;
    uint64_t start;
    lg_role role;
    int index; /* the instance that it is, or is a standby for */
    lg_incarnation me;
    enum program program;
    bool held;                   /* its program begins when lgsup has named it on the board */
    bool stranger, hung, doomed; /* doomed: dies before it is ready */
    bool as_standby;             /* when it was born */
    int setup_left, exit_code;
    unsigned told_by;       /* generation of lgsup under which it was seen to be told to leave */
    lg_mark told_at;        /* a rank: its commit then */
    unsigned parent;        /* generation of lgsup */
    unsigned maps[REGIONS]; /* versions; 0: not mapped */
    uint32_t keeper_epoch;  /* of the board, when they were deposited */
    int64_t moved_ns;       /* machine time of its last step, sleeps not counted */
    int64_t born_ns;
};

struct letter {
    int64_t due_ns;
    uint64_t id; /* who waits for the answer */
    struct lg_message m;
};

/* A swap that lgsup has read and not answered. */
struct order {
    uint64_t id;     /* 0: none */
    uint32_t serial; /* of the last process that was started before */
    lg_role role;
    bool concerns[LG_INSTANCES_MAX]; /* one, or those that there are */
    uint32_t programs; /* bits: the one that was named, or "the one in force", whichever that is */
    bool unsaved;      /* DIR/programs could not be written, and may say anything */
    uint32_t before[LG_INSTANCES_MAX];        /* as machine.may_run, when it came */
    lg_incarnation leaving[LG_INSTANCES_MAX]; /* told to leave before it came */
};

struct machine {
    struct world w;
    struct sim_machine_result *result;
    enum sim_trouble trouble;
    struct proc proc[PROCS_MAX];
    uint32_t serial, deaf;
    int next_pid;
    uint64_t starts;
    int64_t now_ns, slept_ns;
    /* lgsup */
    bool in_lgsup, lgsup_doomed;
    unsigned generation;
    jmp_buf lgsup_dies;
    void *allocation[ALLOCATIONS_MAX];
    uint64_t deaths_left, kills_left, kill_every, speed_every, hang_every, lgsup_every, drain_at;
    uint64_t fail_every; /* spawns, and writes of DIR/programs */
    int crash_role;      /* from a step on every process of it dies before it is ready; -1: none */
    uint64_t crash_from;
    int stuck_role; /* from a step on every process of it hangs in its first piece of work; -1: none */
    uint64_t stuck_from;
    bool gentle; /* nobody fails, and kills fall on those that do not matter; see may_fall() */
    uint64_t got_to[LG_ROLE_keeper]
                   [LG_INSTANCES_MAX]; /* gentle: how far it was at its last death */
    int signals;                       /* pending: bit 0 SIGHUP, bit 1 SIGINT */
    struct letter letter[MESSAGES_MAX];
    int n_letters;
    /* swaps */
    uint64_t last_order, swap_every;
    struct order order[2]; /* the one under way, and one that is refused meanwhile */
    uint32_t may_run[LG_ROLE_keeper]
                    [LG_INSTANCES_MAX]; /* bits of enum program: of its next process */
    char programs[PROGRAMS_BYTES_MAX];  /* the file DIR/programs */
    size_t programs_bytes;
    /* keeper */
    uint32_t keeper;  /* serial; 0: none */
    bool unreachable; /* its socket was removed */
    bool memory_lost, launch_failed;
    unsigned versions[REGIONS], keeper_has[REGIONS], lgsup_has[REGIONS]; /* 0: not at all */
    unsigned used[REGIONS];                                              /* 0: by nobody yet */
    bool recorded[REGIONS], copied[REGIONS][REGION_VERSIONS_MAX];
    enum { HELD, BY_LGSUP, BY_THE_MACHINE } unheld[REGIONS]; /* who ended the last that had it */
    bool lgsup_kills;
    uint64_t disasters_left;
    bool without_lgsup;
    int getpid, stat_pid;
    lg_run run;
    lg_config config;
};
extern struct machine g;

/* Processes. */
struct proc *by_serial(uint32_t serial);
struct proc *by_pid(int pid);
bool lives(const struct proc *p);
/* Does it fill its instance's row, or will it? A standby does not. */
bool is_member(const struct proc *p);
struct proc *new_proc(lg_role role, int index, lg_incarnation me);
struct actor *actor_of(const struct proc *p); /* NULL: this run has no such instance */
void die(struct proc *p, int exit_code);
void kill_proc(struct proc *p);
void step_proc(struct proc *p);

/* Memory. open: false when there is no keeper now. deposit: false when it holds another version. */
bool open_memory(struct proc *p);
bool memory_is_copied(const struct proc *p);
bool deposit_memory(struct proc *p);
void use_memory(const struct proc *p); /* who works, before each step */
void memory_of_lgsup_ends(void);
/* After a holder's end: which regions are in nobody's hands, and whose doing that is. Such memory lgsup may give up, and no
 * other; it may never have ended the last holder itself. */
void note_what_nobody_holds(bool lgsup_killed);

/* Letters to lgsup. false: there is no room. */
bool send_letter(const struct letter *l);
void post(const struct proc *p, lg_message_kind kind);

/* Swaps. */
const char *program_path(enum program p);
enum program program_of_path(const char *path); /* PROGRAM_COUNT: none */
void draw_swap(void);
void order_received(const struct letter *l);
void order_answered(uint64_t id, const struct lg_message *m);
void orders_forgotten(void); /* lgsup is dead */
void orders_unsaved(void);   /* DIR/programs could not be written */
const struct order *order_of(lg_role role);
/* lgsup may kill it although it works: it is a standby, or has come with the swap under way. */
bool may_be_rolled_back(const struct proc *p);
/* A process of an instance is started beside its row, or in it. */
void check_program(const struct proc *p);
/* A rank that is told to leave does so before the next step or the one after. */
void check_rank_leaves(struct proc *p);
/* An instance leaves because it was told to. */
void check_successor(const struct proc *p);
/* The end: lgsup has left in order. */
void check_orders(void);

/* The machine. */
void machine_step(void);
/* Between any two calls of lgsup: others move, or it dies. */
void lgsup_calls(void);
/* lgsup's memory, which its death frees. */
void *own(void *at);
void free_all(void);
