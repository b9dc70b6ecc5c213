/* The processes of a run, found without reading its board: for when the board is another build's, is
 * damaged, or gone. What they are found by has not changed over builds and will not:
 *
 *   lgsup    has DIR/lock open
 *   a stage  maps DIR/board, or was started with `--run DIR`
 *   keeper   is called lg-keeper, and its socket lies in the run's runtime directory or it holds a
 *            memfd that begins as a region of this run does
 *
 * Only processes of our own user are looked at. An lgsup that merely reads the board (top, status)
 * is none of them. */
#pragma once
#include "supervisor/run/run.h"

typedef enum lg_process_kind {
    LG_PROCESS_lgsup,
    LG_PROCESS_stage,
    LG_PROCESS_keeper
} lg_process_kind;

enum { LG_PROCESSES_MAX = 1024, LG_PROCESS_NAME_BYTES = 16 };
struct lg_process {
    lg_process_kind kind;
    int pid;
    int pidfd; /* the caller closes it; what was seen was seen of this process */
    char name[LG_PROCESS_NAME_BYTES];
};

/* Finds them; *ret_n of at most LG_PROCESSES_MAX. LG_ERR_IO when /proc cannot be read. */
int lg_processes_find(const lg_run *r, struct lg_process ret[LG_PROCESSES_MAX], int *ret_n);
void lg_processes_close(struct lg_process *p, int n);
/* Kills all keepers of this run, when no stage is left: an lgsup that died while it started one may have left
 * it, and with its socket removed nobody can reach it. Best effort. */
void lg_processes_end_keepers(const lg_run *r);
/* Kills it and waits for its end. LG_ERR_TIMEOUT, with the state that the kernel shows, when it does
 * not come. */
int lg_process_kill(const struct lg_process *p);
