/* Rules of the hosts and ranks: how they share a batch and the state, and what of that may change at
 * a resume. */
#include "config/rules_private.h"
#include <string.h>

static void check_batch(struct lg_rules *r)
{
    const lg_config *c = r->c;
    int64_t batch = c->trainer_global_batch_size, ranks = c->trainer_ranks;
    int64_t micro = c->trainer_micro_batch_size;
    if (c->trainer_ranks % c->parallel_sp) {
        lg_broken(r, "parallel.sp",
                  "parallel.sp = %lld does not divide trainer.ranks = %lld: set it to a divisor",
                  (long long)c->parallel_sp, (long long)ranks);
        return;
    }
    if (c->hosts_count > 1 && batch % c->hosts_count) {
        lg_broken(
            r, "trainer.global_batch_size",
            "trainer.global_batch_size = %lld does not divide by hosts.count = %lld: set it to a "
            "multiple of %lld",
            (long long)batch, (long long)c->hosts_count, (long long)c->hosts_count);
        return;
    }
    batch /= c->hosts_count;
    ranks /= c->parallel_sp; /* those of a sequence group have one share */
    if (batch % ranks != 0) {
        lg_broken(
            r, "trainer.global_batch_size",
            "trainer.global_batch_size = %lld does not divide by trainer.ranks = %lld: set it to "
            "a multiple of %lld",
            (long long)batch, (long long)ranks, (long long)ranks);
        return;
    }
    if (batch / ranks % micro != 0)
        lg_broken(
            r, "trainer.micro_batch_size",
            "a rank's share of %lld samples (trainer.global_batch_size = %lld over trainer.ranks "
            "= %lld) does not divide by trainer.micro_batch_size = %lld: set that to a divisor of "
            "%lld",
            (long long)(batch / ranks), (long long)batch, (long long)ranks, (long long)micro,
            (long long)(batch / ranks));
}

enum {
    LG_TRAINER_RANKS_SCATTER_MAX = 64 /* a sum has 64 parts at most, one of them the sum so far */
};

static void check_parallel(struct lg_rules *r)
{
    const lg_config *c = r->c;
    if (!c->parallel_reshard && c->parallel_zero < 3)
        lg_broken(
            r, "parallel.reshard",
            "parallel.reshard = false with parallel.zero = %lld, where no weights are gathered: "
            "remove it, or set parallel.zero = 3",
            (long long)c->parallel_zero);
    if (c->parallel_zero >= 2 && c->trainer_ranks >= LG_TRAINER_RANKS_SCATTER_MAX)
        lg_broken(r, "parallel.zero", "parallel.zero = %lld is made for fewer than %d ranks",
                  (long long)c->parallel_zero, LG_TRAINER_RANKS_SCATTER_MAX);
    if (c->parallel_group && c->trainer_ranks % c->parallel_group)
        lg_broken(
            r, "parallel.group",
            "parallel.group = %lld does not divide trainer.ranks = %lld: set it to a divisor, or "
            "to 0 for all ranks",
            (long long)c->parallel_group, (long long)c->trainer_ranks);
    else if (c->parallel_group > 1 && !c->parallel_zero)
        lg_broken(r, "parallel.group",
                  "parallel.group = %lld with parallel.zero = 0, where every rank holds the whole "
                  "state: remove one of them",
                  (long long)c->parallel_group);
}

static void check_hosts(struct lg_rules *r)
{
    const lg_config *c = r->c;
    const int64_t places = c->hosts_count + c->hosts_spare;
    if (c->hosts_count == 1) {
        if (c->hosts_spare || c->hosts_list.n)
            lg_broken(r, "hosts.count",
                      "hosts.count = 1: a run of one host has no list and no spares");
        return;
    }
    if (places > 64)
        lg_broken(r, "hosts.spare", "hosts.count + hosts.spare = %lld: at most 64 machines",
                  (long long)places);
    if (c->hosts_list.n && c->hosts_list.n != places)
        lg_broken(r, "hosts.list",
                  "hosts.list names %d machines, hosts.count + hosts.spare is %lld: one for each",
                  c->hosts_list.n, (long long)places);
    if (c->hosts_number >= places)
        lg_broken(r, "hosts.number", "hosts.number = %lld, but the list has places 0 to %lld",
                  (long long)c->hosts_number, (long long)places - 1);
    if (!c->hosts_key[0])
        lg_broken(r, "hosts.key",
                  "hosts.count = %lld without hosts.key: hosts talk to each other by a key alone; "
                  "`lgsup keys cluster.key` makes one, which all of them get a copy of",
                  (long long)c->hosts_count);
    if (!strcmp(c->hosts_transport, "nccl") && strcmp(c->_device, "cuda") != 0)
        lg_broken(r, "hosts.transport",
                  "hosts.transport = \"nccl\" with device = \"%s\": NCCL carries what lies on GPUs "
                  "alone; \"ucx\" carries the hosts' memory",
                  c->_device);
}

/* What changes the order of sums, and no state. */
static void check_resume_changes(struct lg_rules *r)
{
    const struct lg_strlist *l = &r->c->trainer_resume_changes;
    for (int i = 0; i < l->n; i++) {
        if (!lg_config_may_change(l->v[i]))
            lg_broken(
                r, "trainer.resume_changes",
                "trainer.resume_changes: %.80s is not one of trainer.ranks, trainer.threads, "
                "trainer.micro_batch_size, parallel.zero, parallel.sp, parallel.sp_kind, "
                "memory.offload_optimizer, memory.mlp_chunks, trainer.optimizer, trainer.groups: "
                "other keys cannot change at a resume",
                l->v[i]);
    }
}

void lg_rules_ranks(struct lg_rules *r)
{
    check_batch(r);
    check_parallel(r);
    check_hosts(r);
    check_resume_changes(r);
}
