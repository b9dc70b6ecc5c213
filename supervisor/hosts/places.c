/* Addresses of the machines; see places.h. */
#include "supervisor/hosts/places.h"
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int resolve(const char *name, char ret[LG_HOST_ADDRESS_BYTES])
{
    struct addrinfo *found = NULL, wanted = {.ai_socktype = SOCK_STREAM};
    const int e = getaddrinfo(name, NULL, &wanted, &found);
    if (e)
        return LG_FAIL(LG_ERR_CONFIG, "hosts.list: \"%s\" has no address: %s", name,
                       gai_strerror(e));
    const int f = getnameinfo(found->ai_addr, found->ai_addrlen, ret, LG_HOST_ADDRESS_BYTES, NULL,
                              0, NI_NUMERICHOST);
    freeaddrinfo(found);
    if (f) return LG_FAIL(LG_ERR_CONFIG, "hosts.list: \"%s\": %s", name, gai_strerror(f));
    return 0;
}

static int add(void *arg, const char *name)
{
    struct lg_host_places *p = arg;
    if (p->n == LG_PLACES_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "more than %d machines", LG_PLACES_MAX);
    LG_TRY(resolve(name, p->address[p->n]));
    p->n++;
    return 0;
}

static int take_slurm(const lg_config *c, struct lg_host_places *p)
{
    const char *list = getenv("SLURM_JOB_NODELIST");
    const int64_t wanted = c->hosts_count + c->hosts_spare;
    if (!list || !*list)
        return LG_FAIL(LG_ERR_CONFIG,
                       "hosts.count = %lld, but hosts.list is empty and this is no "
                       "Slurm job (no SLURM_JOB_NODELIST): name the machines",
                       (long long)c->hosts_count);
    LG_TRY(lg_hostlist_expand(list, add, p));
    if (p->n != wanted)
        return LG_FAIL(LG_ERR_CONFIG,
                       "the Slurm job has %d nodes (%s), hosts.count + hosts.spare is %lld: "
                       "allocate as many",
                       p->n, list, (long long)wanted);
    return 0;
}

/* Calls is() for each address of this machine (numeric, and its interface) until it says true. */
static bool own_address(bool (*is)(void *arg, const char *address, const char *interface),
                        void *arg)
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all) < 0) return false;
    for (struct ifaddrs *a = all; a && !found; a = a->ifa_next) {
        char text[LG_HOST_ADDRESS_BYTES];
        if (!a->ifa_addr || !(a->ifa_flags & IFF_UP)) continue;
        const int family = a->ifa_addr->sa_family;
        const socklen_t bytes = family == AF_INET    ? sizeof(struct sockaddr_in)
                                : family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                     : 0;
        if (bytes && !getnameinfo(a->ifa_addr, bytes, text, sizeof text, NULL, 0, NI_NUMERICHOST))
            found = is(arg, text, a->ifa_name);
    }
    freeifaddrs(all);
    return found;
}

static bool is_listed(void *arg, const char *address, const char *interface)
{
    struct lg_host_places *p = arg;
    (void)interface;
    for (int i = 0; i < p->n && p->own < 0; i++)
        if (!strcmp(p->address[i], address)) p->own = i;
    return p->own >= 0;
}

struct wanted {
    const char *interface;
    char *ret;
};

/* The first one that is not a link's own (fe80::), which others could not reach. */
static bool is_of_interface(void *arg, const char *address, const char *interface)
{
    const struct wanted *w = arg;
    if (strcmp(w->interface, interface) != 0 || strchr(address, '%')) return false;
    snprintf(w->ret, LG_HOST_ADDRESS_BYTES, "%s", address);
    return true;
}

static int find_own(const lg_config *c, struct lg_host_places *p)
{
    const char *node = getenv("SLURM_NODEID"), *nodes = getenv("SLURM_STEP_NUM_NODES");
    const bool is_whole = !c->hosts_list.n && node && nodes && atoi(nodes) == p->n;
    p->own = (int)c->hosts_number;
    if (p->own < 0 && is_whole)
        p->own = atoi(node); /* of a step on all nodes, in the list's order */
    if (p->own < 0) own_address(is_listed, p);
    if (p->own < 0 || p->own >= p->n)
        return LG_FAIL(LG_ERR_CONFIG,
                       "none of hosts.list is an address of this machine: set hosts.number to its "
                       "place in the list, or mend the list");
    return 0;
}

int lg_host_places_find(const lg_config *c, struct lg_host_places *ret)
{
    struct lg_host_places p = {.own = -1};
    if (!c->hosts_list.n) LG_TRY(take_slurm(c, &p));
    for (int i = 0; i < c->hosts_list.n; i++) LG_TRY(add(&p, c->hosts_list.v[i]));
    LG_TRY(find_own(c, &p));
    struct wanted w = {c->hosts_interface, p.exchange};
    memcpy(p.exchange, p.address[p.own], sizeof p.exchange);
    if (c->hosts_interface[0] && !own_address(is_of_interface, &w))
        return LG_FAIL(LG_ERR_CONFIG,
                       "hosts.interface: there is no \"%s\" with an address that is up",
                       c->hosts_interface);
    for (int i = 0; i < p.n; i++)
        for (int k = 0; k < i; k++)
            if (!strcmp(p.address[i], p.address[k]))
                return LG_FAIL(LG_ERR_CONFIG,
                               "hosts.list: places %d and %d have the same address %s", k, i,
                               p.address[i]);
    *ret = p;
    return 0;
}
