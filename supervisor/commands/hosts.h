/* A run of several hosts: how a start becomes one of them (supervisor/hosts/cluster.h), `lgsup keys`, `lgsup hosts`. */
#pragma once
#include "supervisor/hosts/cluster.h"
#include "supervisor/run/run.h"

struct lg_hosts_waiting {
    bool quiet;
    int ready_fd; /* of a start that is detached: 0 is written here when others are waited for; -1 */
};
/* Of a run of several hosts: waits until this machine is a host, and takes over what all begin with: number, start
 * step, data set. LG_ERR_STOP: the run has ended without it, or (ret->host < 0) a signal says that this machine is to wait no
 * longer; that is what DIR/waiting then still says. *ret_cluster stays NULL, and *ret 0, where there is one host. */
int lg_hosts_join(lg_run *r, const struct lg_hosts_waiting *how, struct lg_cluster_place *ret,
                  lg_cluster **ret_cluster);
/* There is nothing to do for any host: tells the others so, and leaves when they know. */
void lg_hosts_part(lg_cluster **c);
/* The host of a former lgsup, of this board. LG_ERR_NOTFOUND, with r->memory_lost: it had not become one. */
int lg_hosts_rejoin(lg_run *r, lg_board *b, lg_cluster **ret_cluster);
/* `lgsup hosts [--take] DIR`: who takes part, as this host knows it; take: the hosts that are there go on without the
 * others. */
int lg_hosts_command(const char *dir, bool take);
