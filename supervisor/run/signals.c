/* See signals.h. */
#include "supervisor/run/signals.h"

sigset_t lg_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    return set;
}

void lg_signals_hold(bool hold)
{
    sigset_t set = lg_signals();
    sigprocmask(hold ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
}
