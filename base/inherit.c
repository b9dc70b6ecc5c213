/* See inherit.h. */
#include "base/inherit.h"
#include "base/check.h"
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

void lg_inherit(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        int got = open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY);
        if (got < 0) got = open("/", O_PATH); /* without a /dev: whoever uses it gets an error */
        LG_ASSERT(got == fd); /* those below are there, and the lowest free number is given */
    }
    signal(SIGCHLD, SIG_DFL);
    signal(SIGXFSZ, SIG_IGN);
}
