/* What an earlier start has left in a run directory: may it live? Asked under the run's lock, before
 * anything is adopted, started or ended.
 *
 * Only another boot of this machine, or the word that the run has ended, means for certain that nothing
 * lives (shm/preamble.h). Of what may live and cannot be adopted, a second set of processes would write
 * the same metrics, ledger and checkpoints: so such a start or stop is refused, with what differs and
 * how to end what runs. */
#pragma once
#include "shm/board.h"
#include "supervisor/run/run.h"

/* 0: there is nothing, or nothing that lives, or what may live is on a board that lg_former_open opens.
 * LG_ERR_MISMATCH, LG_ERR_CORRUPT, LG_ERR_BUSY ...: refused, with what to do. */
int lg_former_check(const lg_run *r);
/* LG_ERR_MISMATCH where the board was copied from another run directory: what it and its neighbours name, processes
 * and sockets, are that one's. */
int lg_former_check_copy(const lg_run *r);
/* The board. LG_ERR_NOTFOUND, without a trace: none whose processes may live. */
int lg_former_open(const lg_run *r, lg_board **ret);
