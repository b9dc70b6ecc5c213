/* See signals.h. */
#include "supervisor/run/signals.h"
#include <sys/pidfd.h>
#include <unistd.h>

static bool g_hangup_ignored;

void lg_signals_inherit(void)
{
    struct sigaction was;
    g_hangup_ignored = sigaction(SIGHUP, NULL, &was) == 0 && was.sa_handler == SIG_IGN;
}

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

int lg_signals_ask_drain(int pidfd)
{
    siginfo_t info = {.si_signo = SIGHUP, .si_code = SI_QUEUE};
    info.si_pid = getpid();
    info.si_uid = getuid();
    return pidfd_send_signal(pidfd, SIGHUP, &info, 0);
}

bool lg_signals_asks_drain(int32_t code)
{
    return !g_hangup_ignored || code == SI_QUEUE;
}
