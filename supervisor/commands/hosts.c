/* Several hosts, from the command line; see hosts.h. */
#include "supervisor/commands/hosts.h"
#include "base/clock.h"
#include "base/printable.h"
#include "supervisor/commands/answerer.h"
#include "supervisor/commands/order.h"
#include "supervisor/run/signals.h"
#include "supervisor/run/terminal.h"
#include "supervisor/run/waiting.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* FIRST_SAY, SAY_EVERY: after how many waits of ASK_MS it is said what is waited for. */
enum { ASK_MS = 200, FIRST_SAY = 4, SAY_EVERY = 150, PART_LOOK_MS = 50 };

static void take_over(lg_run *r, const struct lg_cluster_place *p)
{
    r->plan.host = p->host;
    r->start_step = p->origin.step;
    r->n_data = p->origin.n_data;
    memcpy(r->data, p->origin.data, sizeof r->data);
    if (p->comes) r->resume[0] = 0; /* its state is another host's */
}

/* Whoever has started this one in the background may have to start the others next. */
static void let_parent_go(const struct lg_hosts_waiting *how)
{
    const char byte = 0;
    if (how->ready_fd < 0) return;
    const ssize_t ignored = write(how->ready_fd, &byte, 1);
    (void)ignored;
}

/* Has a signal come that ends a run? */
static bool is_told_to_stop(void)
{
    const sigset_t set = lg_signals();
    const struct timespec now = {0};
    siginfo_t info;
    const int number = sigtimedwait(&set, &info, &now);
    return number > 0 && (number != SIGHUP || lg_signals_asks_drain(info.si_code));
}

static int wait_for_others(lg_run *r, lg_cluster *c, const struct lg_hosts_waiting *how,
                           struct lg_cluster_place *ret)
{
    char what[300], said[300] = "";
    for (int n = 0;; n++) {
        const int rc = lg_cluster_join(c, ASK_MS, ret);
        if (rc == LG_ERR_STOP) return rc;
        LG_TRY(rc);
        if (rc == 1) return 0;
        if (is_told_to_stop()) {
            *ret = (struct lg_cluster_place){.host = -1};
            return LG_ERR_STOP;
        }
        if (n < FIRST_SAY) continue; /* those that are there find each other sooner */
        lg_cluster_waits_for(c, what, sizeof what);
        const bool is_new = strcmp(what, said) != 0;
        if (is_new) lg_waiting_say(r, what);
        if (n == FIRST_SAY) let_parent_go(how);
        if ((!how->quiet || how->ready_fd >= 0) && (is_new || n % SAY_EVERY == FIRST_SAY))
            lg_terminal_say(STDOUT_FILENO, "%s\n", what);
        memcpy(said, what, sizeof said);
    }
}

int lg_hosts_join(lg_run *r, const struct lg_hosts_waiting *how, struct lg_cluster_place *ret,
                  lg_cluster **ret_cluster)
{
    struct lg_cluster_spec spec = {.config = r->config,
                                   .plan_hash = r->plan.hash,
                                   .lineage = r->lineage,
                                   .origin = {.step = r->start_step, .n_data = r->n_data}};
    memset(ret, 0, sizeof *ret);
    *ret_cluster = NULL;
    if (r->plan.hosts == 1) return 0;
    memcpy(spec.origin.data, r->data, sizeof r->data);
    LG_TRY(lg_answerer_make(r->dir, &spec.answerer));
    LG_TRY(lg_cluster_open(&spec, ret_cluster));
    lg_signals_hold(true);
    const int rc = wait_for_others(r, *ret_cluster, how, ret);
    lg_signals_hold(false);
    if (rc < 0) lg_cluster_close(ret_cluster);
    if (rc == LG_ERR_STOP) return rc;
    LG_TRY(rc);
    lg_waiting_forget(r);
    take_over(r, ret);
    if (!how->quiet)
        lg_terminal_say(STDOUT_FILENO, "host %d of %d, from step %" PRIu64 "\n", ret->host,
                        r->plan.hosts, r->start_step);
    return 0;
}

void lg_hosts_part(lg_cluster **c)
{
    const struct timespec look = {.tv_nsec = PART_LOOK_MS * LG_MS_NS};
    while (!lg_cluster_finish(*c)) nanosleep(&look, NULL);
    lg_cluster_close(c);
}

int lg_hosts_rejoin(lg_run *r, lg_board *b, lg_cluster **ret_cluster)
{
    struct lg_cluster_spec spec = {
        .config = r->config, .plan_hash = r->plan.hash, .lineage = b->s->lineage, .board = b};
    *ret_cluster = NULL;
    if (r->plan.hosts == 1) return 0;
    LG_TRY(lg_answerer_make(r->dir, &spec.answerer));
    const int rc = lg_cluster_open(&spec, ret_cluster);
    r->memory_lost = rc == LG_ERR_NOTFOUND;
    LG_TRY(rc);
    return 0;
}

/* As the board of this host has it; of another boot's, or of a run that has ended, what was last. */
static void show(lg_board *b)
{
    static struct lg_hosts_record e;
    const struct lg_board_hosts *s = &b->s->hosts;
    const uint64_t number = lg_hosts_epoch(b, &e);
    if (atomic_load(&s->lost)) {
        printf("this was host %d of %d, and is not one of the run any more\n", s->host, s->count);
        return;
    }
    if (!number) {
        printf("host %d of %d: not yet one of the run\n", s->host, s->count);
        return;
    }
    printf("epoch %" PRIu64 "\n", number);
    for (int h = 0; h < s->count; h++) {
        const struct lg_host_card *c = &s->card[h];
        const lg_mark commit = atomic_load_explicit(&c->commit, memory_order_acquire);
        if (!(e.members >> h & 1))
            printf("host %d  missing\n", h);
        else if (atomic_load_explicit(&c->said_in, memory_order_acquire) != number ||
                 commit == LG_MARK_NONE)
            printf("host %d  %s  has no state yet%s%s\n", h, e.member[h].address,
                   h == e.leader ? ", leads" : "", h == s->host ? ", this one" : "");
        else
            printf("host %d  %s  state %" PRIu64 "%s%s\n", h, e.member[h].address,
                   lg_mark_state(commit), h == e.leader ? ", leads" : "",
                   h == s->host ? ", this one" : "");
    }
}

int lg_hosts_command(const char *dir, bool take)
{
    char path[LG_PATH_BYTES];
    struct lg_waiting waiting;
    lg_board *b = NULL;
    if (take) {
        LG_TRY(lg_order_take(dir));
        return 0;
    }
    if (lg_waiting_read(dir, &waiting)) {
        lg_print(stdout, "%s\n", waiting.what);
        return 0;
    }
    LG_TRY(lg_path(path, "%s/board", dir));
    LG_TRY(lg_board_open(path, 0, &b));
    const bool several = lg_hosts_are_several(b);
    if (several) show(b);
    lg_board_close(&b);
    if (!several) return LG_FAIL(LG_ERR_USAGE, "the run in %s has one host", dir);
    return 0;
}
