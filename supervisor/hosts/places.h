/* Where the machines of a run are: hosts.list, or the nodes of the Slurm job that this process is a part of. */
#pragma once
#include "config/config.h"
#include "supervisor/hosts/group.h"

struct lg_host_places {
    int n, own; /* hosts.count + hosts.spare; this machine's */
    char address[LG_PLACES_MAX][LG_HOST_ADDRESS_BYTES]; /* numeric */
    char exchange[LG_HOST_ADDRESS_BYTES];               /* of this machine's exchange processes */
};
/* Asks the resolver for names. LG_ERR_CONFIG with what to do: no list, a name that has no address, this machine is not
 * in it, no such interface. */
int lg_host_places_find(const lg_config *c, struct lg_host_places *ret);

/* The names in a node list of Slurm's, "a[1-3,07],b" (scontrol show hostnames), in its order; several bracket groups
 * in a name multiply, the last one fastest; zeros in front are kept. fn returns < 0 to end it. Returns how many, or an
 * lg_err: LG_ERR_CONFIG for what is no list. */
int lg_hostlist_expand(const char *list, int (*fn)(void *arg, const char *name), void *arg);
