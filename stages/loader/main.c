#include "base/log.h"
#include "stages/loader/look.h"
#include "stages/roles.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { SETS_MAX = 64 };

static int look(int argc, char **argv)
{
    const char *set[SETS_MAX];
    int n = 0;
    for (int i = 3; i < argc; i += 2) {
        if (strcmp(argv[i], "--set") != 0 || i + 1 == argc || n == SETS_MAX)
            return LG_FAIL(LG_ERR_USAGE, "usage: %s --look DIR|FILE.toml [--set KEY=VALUE ...]",
                           argv[0]);
        set[n++] = argv[i + 1];
    }
    return lg_loader_look(argv[2], set, n);
}

/* Beside the loader of a run: a look at a data set, or at a run's ledger. */
int main(int argc, char **argv)
{
    const bool looks = argc >= 3 && !strcmp(argv[1], "--look");
    if (!looks && !(argc == 3 && !strcmp(argv[1], "--ledger")))
        return lg_stage_main(argc, argv, &lg_loader_def);
    lg_log_set_level(LG_WARN);
    int rc = looks ? look(argc, argv) : lg_loader_check_ledger(argv[2]);
    if (rc == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = LG_FAIL(lg_err_from_errno(errno), "cannot write the output: %s", strerror(errno));
    if (rc < 0) fprintf(stderr, "%s: %s\n", argv[0], lg_err_message());
    return -rc;
}
