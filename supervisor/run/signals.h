/* The signals that ask lgsup to end a run: SIGINT, SIGTERM and SIGHUP. Its loop reads them from a
 * signalfd, so from some point before the loop on they have to wait. */
#pragma once
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

/* Looks whether SIGHUP is ignored, as nohup has it: then a terminal that ends does not end the run. In main(). */
void lg_signals_inherit(void);
sigset_t lg_signals(void);
/* They wait from now on (for the loop, or for sigtimedwait), or no longer. */
void lg_signals_hold(bool hold);
/* `lgsup stop`'s SIGHUP, which asks for a drain however often it comes, and under nohup, too: its code is
 * SI_QUEUE. */
int lg_signals_ask_drain(int pidfd);
/* Does a SIGHUP with this code ask for one? */
bool lg_signals_asks_drain(int32_t code);
