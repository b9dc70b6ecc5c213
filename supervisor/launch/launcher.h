/* Who starts the processes of a run, as a table of functions with two rows:
 *
 *   fork      lgsup starts every stage and the keeper as its own child (fork.c)
 *   systemd   each is a systemd unit, which systemd starts and starts again (systemd.c)
 *
 * The rest of lgsup calls the row of its run and never asks which one it is. A row only starts
 * processes and tells what it has seen; what follows from that is decided in supervisor/core/. */
#pragma once
#include "shm/board.h"
#include "supervisor/run/child.h"
#include "supervisor/run/run.h"

/* A process that is wanted for an instance. */
struct lg_launch {
    const lg_run *run;
    lg_board *board;
    lg_role role;
    int index;
    const char *program; /* path; NULL: the one beside lgsup */
    const char *log;     /* file for what it prints */
};
struct lg_launched {
    lg_incarnation incarnation; /* 0: it will come to the board by itself, look for it */
    struct lg_child child;
};

/* lg_spawn.enter, with a seat as `where`: names the child on the board (shm/board.h, rule 2). */
struct lg_launch_seat {
    lg_board *board;
    lg_incarnation who;
};
int lg_launch_enter(void *where, const struct lg_child *child);

/* What a look at the board has found of an instance without a known process. */
struct lg_sighting {
    enum {
        LG_SEEN_NOBODY,
        LG_SEEN_SOMEBODY, /* `who` is enlisted or has joined; `child` is its process */
        LG_SEEN_UNCLEAR,  /* it is there, and cannot be looked at now: look again */
        LG_SEEN_DEAD,     /* `who` came and is dead; its row is buried */
    } what;
    lg_incarnation who;
    struct lg_child child;
};

struct lg_launcher {
    /* Processes come to the board unasked, also while no lgsup lives, but never for an index that is
     * not wanted. */
    bool joins_unasked;
    /* The keeper is a service with a store of fds: memory outlives every process, lgsup neither starts
     * nor kills it but makes it forget, and a parked run keeps no memory in it. */
    bool keeper_is_service;
    /* The functions; what each does stands in launcher.def. */
#define LG_LAUNCHER(result, function, arguments) result(*function) arguments;
#include "supervisor/launch/launcher.def"
#undef LG_LAUNCHER
};
extern const struct lg_launcher lg_launcher_fork, lg_launcher_systemd;

/* The row of a run: systemd's when run->units names units. */
const struct lg_launcher *lg_launcher_of(const lg_run *r);

/* DIR/systemd names the units that a run's processes belong to; without it they were started by lgsup.
 * systemd and lgsup must not both start what dies, so a start or stop checks it first: LG_ERR_BUSY when
 * the processes are somebody else's. */
int lg_launcher_check_owner(const lg_run *r);
/* Writes it for a new run. */
int lg_launcher_record_owner(const lg_run *r);
/* The units that it names; "" for none. Fails when it is there and cannot be read: whose the processes
 * are is not known then. */
int lg_launcher_recorded_units(const lg_run *r, char ret[LG_UNITS_BYTES]);
