/* The signals that ask lgsup to end a run: SIGINT, SIGTERM and SIGHUP. Its loop reads them from a
 * signalfd, so from some point before the loop on they have to wait. */
#pragma once
#include <signal.h>
#include <stdbool.h>

sigset_t lg_signals(void);
/* They wait from now on (for the loop, or for sigtimedwait), or no longer. */
void lg_signals_hold(bool hold);
