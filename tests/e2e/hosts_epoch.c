/* Tells the boards of hosts of an epoch, as their supervisors would: hosts_epoch NUMBER LEADER RUN...
 *
 * RUN... are the run directories of all members, in any order; the one of host h is told that host k listens at address
 * 127.0.0.(k + 1), port 1 above that of its config. With LEADER "settled" nothing is told; prints the state in which the
 * first RUN's epoch has come to rest and exits 0, or exits 1. */
#include "config/config.h"
#include "shm/board.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int open_board(const char *run, lg_board **ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/board", run));
    return lg_board_open(path, 0, ret);
}

static int port_of(const char *run, uint32_t *ret)
{
    char path[LG_PATH_BYTES];
    lg_config *c;
    LG_TRY(lg_path(path, "%s/config.toml", run));
    LG_TRY(lg_config_load(path, NULL, 0, &c));
    *ret = (uint32_t)c->hosts_port + 1;
    lg_config_free(&c);
    return 0;
}

static int tell(int argc, char **argv)
{
    struct lg_hosts_record e = {.number = strtoull(argv[1], NULL, 10), .leader = atoi(argv[2])};
    lg_board *board[LG_HOSTS_MAX];
    const int n = argc - 3;
    for (int i = 0; i < n; i++) {
        LG_TRY(open_board(argv[3 + i], &board[i]));
        const int h = board[i]->s->hosts.host;
        e.members |= UINT64_C(1) << h;
        snprintf(e.member[h].address, sizeof e.member[h].address, "127.0.0.%d", h + 1);
        LG_TRY(port_of(argv[3 + i], &e.member[h].port));
    }
    for (int i = 0; i < n; i++) lg_hosts_enter(board[i], &e);
    return 0;
}

static int settled(const char *run)
{
    lg_board *b;
    uint64_t state;
    LG_TRY(open_board(run, &b));
    if (!lg_hosts_settled(b, &state)) return 1;
    printf("%llu\n", (unsigned long long)state);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc - 3 > LG_HOSTS_MAX) return 2;
    const int rc = strcmp(argv[2], "settled") == 0 ? settled(argv[3]) : tell(argc, argv);
    if (rc < 0) fprintf(stderr, "hosts_epoch: %s\n", lg_err_message());
    return rc < 0 ? -rc : rc;
}
