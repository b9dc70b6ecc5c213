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
/* Brings those of a kind to the front; how many they are. */
int lg_processes_only(struct lg_process *p, int n, lg_process_kind kind);
/* Kills them all, and waits for none: a driver can take a minute to let go of much memory, and while it does for one, the
 * others shall not live on. */
void lg_processes_kill(const struct lg_process *p, int n);
/* Waits until all have ended. on_wait, which may be NULL, is called now and then for one that has not, with where the
 * kernel has it. LG_ERR_TIMEOUT when one has not after three minutes. */
typedef void lg_process_on_wait(const struct lg_process *p, const char *place);
int lg_processes_wait(const struct lg_process *p, int n, lg_process_on_wait *on_wait);
