/* The thread that hears and speaks, and the calls of others; see cluster.h. Everything but the wait for messages is done
 * under one lock. */
#include "supervisor/hosts/cluster.h"
#include "base/clock.h"
#include "supervisor/hosts/cluster_private.h"
#include "supervisor/hosts/on_board.h"
#include "supervisor/hosts/shared.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { BEATS_PER_SILENCE = 3, LOOK_MS = 25, LINK_PATIENCE_MS = 2000 };

static void wake(const lg_cluster *c)
{
    const uint64_t one = 1;
    const ssize_t ignored = write(c->wake_fd, &one, sizeof one);
    (void)ignored;
}

static void *run(void *arg)
{
    lg_cluster *c = arg;
    pthread_mutex_lock(&c->lock);
    while (!c->ends) {
        uint64_t scrap;
        lg_cluster_turn(c);
        pthread_mutex_unlock(&c->lock);
        lg_channel_wait(c->channel, c->wake_fd, LOOK_MS);
        const ssize_t ignored = read(c->wake_fd, &scrap, sizeof scrap);
        (void)ignored;
        pthread_mutex_lock(&c->lock);
    }
    lg_cluster_send_all(c);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* ---- beginning and end ---- */

/* Signals are the loop's. */
static int start_thread(lg_cluster *c)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int e = pthread_create(&c->thread, NULL, run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (e) return LG_FAIL(LG_ERR_NOSPACE, "cannot start a thread: %s", strerror(e));
    c->runs = true;
    return 0;
}

static int identify(const struct lg_cluster_spec *s, struct lg_identity *ret)
{
    uint64_t bytes, program;
    LG_TRY(lg_hash_file("/proc/self/exe", &program, &bytes));
    *ret = (struct lg_identity){.plan = s->plan_hash,
                                .lineage = s->lineage,
                                .build = program ^ lg_layout_hash(),
                                .max_steps = (uint64_t)s->config->trainer_max_steps};
    return 0;
}

/* A supervisor that takes over may find the folder gone: it goes on, and does not know its number. */
static int find_shared(lg_cluster *c, const struct lg_cluster_spec *s)
{
    LG_TRY(lg_path(c->shared, "%s", s->config->hosts_shared));
    if (!c->shared[0]) return 0;
    const int rc = lg_shared_number(c->shared, s->lineage, !s->board, &c->shared_number);
    if (rc < 0 && s->board) {
        lg_err_clear();
        c->shared_number = 0;
        return 0;
    }
    LG_TRY(rc);
    return 0;
}

static uint64_t new_life(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int make_group(lg_cluster *c, const struct lg_cluster_spec *s)
{
    const lg_config *k = s->config;
    struct lg_group_setup setup = {.place = c->places.own,
                                   .places = c->places.n,
                                   .count = (int)k->hosts_count,
                                   .life = s->board ? s->board->s->hosts.life : new_life(),
                                   .silence_ns = k->hosts_silence_ms * LG_MS_NS,
                                   .shared = k->hosts_shared[0] != 0,
                                   .origin = s->origin};
    struct lg_group_before before;
    LG_TRY(identify(s, &setup.identity));
    setup.identity.shared = c->shared_number;
    memcpy(setup.address, c->places.exchange, sizeof setup.address);
    lg_group_init(&c->group, &setup);
    if (!s->board) return 0;
    if (!lg_group_read_before(s->board, &before))
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "lgsup died before this host was one of the run: nothing to take over");
    lg_group_restore(&c->group, &before, lg_now_ns());
    c->board = s->board;
    return 0;
}

static int open_all(lg_cluster *c, const struct lg_cluster_spec *s)
{
    const lg_config *k = s->config;
    LG_TRY(lg_host_places_find(k, &c->places));
    memcpy(c->exchange, c->places.address, sizeof c->exchange);
    memcpy(c->exchange[c->places.own], c->places.exchange, sizeof c->places.exchange);
    c->port = (uint32_t)k->hosts_port + 1;
    c->lineage = s->lineage;
    c->beat_ns = k->hosts_silence_ms * LG_MS_NS / BEATS_PER_SILENCE;
    LG_TRY(find_shared(c, s));
    LG_TRY(make_group(c, s));
    struct lg_channel_spec channel = {.place = c->places.own,
                                      .places = c->places.n,
                                      .port = (int)k->hosts_port,
                                      .address = c->places.address,
                                      .silence_ms = (int)k->hosts_silence_ms};
    LG_TRY(lg_cluster_key_load(k->hosts_key, &channel.key));
    const int rc = lg_channel_open(&channel, &c->channel);
    explicit_bzero(&channel.key, sizeof channel.key);
    LG_TRY(rc);
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (c->wake_fd < 0) return LG_FAIL(LG_ERR_IO, "eventfd: %s", strerror(errno));
    LG_TRY(lg_worker_open(
        &(struct lg_worker_spec){.name = "lg-epochs", .jobs_max = 4, .wake_fd = c->wake_fd},
        &c->worker));
    LG_TRY(lg_answers_open(&(struct lg_answers_spec){.answerer = s->answerer,
                                                     .lineage = s->lineage,
                                                     .wake_fd = c->wake_fd},
                           &c->answers));
    LG_TRY(start_thread(c));
    return 0;
}

int lg_cluster_open(const struct lg_cluster_spec *s, lg_cluster **ret)
{
    pthread_condattr_t monotonic;
    lg_cluster *c = calloc(1, sizeof *c);
    static_assert(sizeof(struct lg_beat) <= LG_CHANNEL_BYTES, "a beat fits into a message");
    if (!c) return LG_FAIL(LG_ERR_NOSPACE, "no memory for other hosts");
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &monotonic);
    c->wake_fd = -1;
    const int rc = open_all(c, s);
    if (rc < 0) {
        lg_cluster_close(&c);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = c;
    return 0;
}

void lg_cluster_close(lg_cluster **pc)
{
    lg_cluster *c = *pc;
    *pc = NULL;
    if (!c) return;
    if (c->runs) {
        pthread_mutex_lock(&c->lock);
        if (c->group.own.phase != LG_GROUP_done) c->group.own.phase = LG_GROUP_lost;
        c->ends = true;
        pthread_mutex_unlock(&c->lock);
        wake(c);
        pthread_join(c->thread, NULL);
    }
    if (c->worker) lg_worker_close(&c->worker, LINK_PATIENCE_MS);
    lg_answers_close(&c->answers);
    lg_channel_close(&c->channel);
    if (c->wake_fd >= 0) close(c->wake_fd);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* ---- the loop's and the start's side ---- */

int lg_cluster_join(lg_cluster *c, int timeout_ms, struct lg_cluster_place *ret)
{
    const int64_t until_ns = lg_now_ns() + timeout_ms * LG_MS_NS;
    const struct timespec until = {until_ns / LG_S_NS, until_ns % LG_S_NS};
    struct lg_cluster_place p;
    int rc = 0, late = 0;
    pthread_mutex_lock(&c->lock);
    do {
        if (c->refused)
            rc = LG_FAIL(LG_ERR_MISMATCH, "%s: start the same on all hosts", c->group.text);
        else if (c->lost)
            rc = LG_FAIL(LG_ERR_BUSY, "%s", c->group.text);
        else if (c->ended)
            rc = LG_ERR_STOP;
        else if (lg_group_place(&c->group, &p.host, &p.origin, &p.comes))
            rc = 1;
        else
            late = pthread_cond_timedwait(&c->changed, &c->lock, &until);
    } while (rc == 0 && !late);
    if (rc == 1) {
        p.life = c->group.own.life;
        if (c->group.own.phase == LG_GROUP_joining) lg_group_come(&c->group, p.host, p.origin.step);
        c->next_beat_ns = 0; /* the others wait for this word */
        wake(c);
        *ret = p;
    }
    pthread_mutex_unlock(&c->lock);
    return rc;
}

/* Members of the run's epoch whose machine is silent, or has begun anew. */
static uint64_t gone_members(const lg_cluster *c)
{
    const struct lg_group *g = &c->group;
    const struct lg_epoch *e = &g->own.epoch;
    uint64_t gone = 0;
    for (int h = 0; h < g->setup.count; h++) {
        const int p = e->place[h];
        const uint64_t life = p == g->setup.place ? g->own.life : g->last[p].life;
        if ((e->members >> h & 1) && (life != e->life[h] || !lg_group_is_up(g, p, lg_now_ns())))
            gone |= UINT64_C(1) << h;
    }
    return gone;
}

static void say_run(const lg_cluster *c, char *ret, size_t bytes)
{
    char hosts[200];
    const uint64_t gone = gone_members(c), all = lg_hosts_all(c->group.setup.count);
    lg_cluster_list(gone, hosts, sizeof hosts);
    if (gone)
        snprintf(ret, bytes,
                 "the run has lost host%s %s: this one waits until those that are left have "
                 "decided to go on (`lgsup hosts` there)",
                 gone & (gone - 1) ? "s" : "", hosts);
    else if (c->group.own.epoch.members != all)
        snprintf(ret, bytes, "this one waits until it is given the number of a host that is lost");
    else
        snprintf(ret, bytes,
                 "the run goes on with all of its %d hosts: this one waits until one is "
                 "lost",
                 c->group.setup.count);
}

void lg_cluster_waits_for(lg_cluster *c, char *ret, size_t bytes)
{
    char places[200];
    uint64_t missing = 0;
    pthread_mutex_lock(&c->lock);
    for (int p = 0; p < c->group.setup.count; p++)
        if (!lg_group_is_up(&c->group, p, lg_now_ns())) missing |= UINT64_C(1) << p;
    lg_cluster_list(missing, places, sizeof places);
    if (c->group.own.epoch.number)
        say_run(c, ret, bytes);
    else if (missing)
        snprintf(ret, bytes, "machine %d of hosts.list waits for machine%s %s", c->places.own,
                 missing & (missing - 1) ? "s" : "", places);
    else
        snprintf(ret, bytes, "machine %d of hosts.list waits for the run to be formed",
                 c->places.own);
    pthread_mutex_unlock(&c->lock);
}

void lg_cluster_attach(lg_cluster *c, lg_board *b)
{
    pthread_mutex_lock(&c->lock);
    c->board = b;
    if (c->lost) lg_hosts_lose(b);
    lg_cluster_write_epoch(c);
    if (c->group.own.phase == LG_GROUP_member) lg_group_write_votes(b, &c->group.own);
    pthread_mutex_unlock(&c->lock);
    wake(c);
}

bool lg_cluster_news(lg_cluster *c, struct lg_cluster_news *ret)
{
    pthread_mutex_lock(&c->lock);
    const bool some = c->n_news > 0;
    if (some) {
        *ret = c->news[c->first_news];
        c->first_news = (c->first_news + 1) % LG_CLUSTER_NEWS_MAX;
        c->n_news--;
    } else if (c->lost) {
        *ret = (struct lg_cluster_news){.lost = true, .bad = true};
        snprintf(ret->text, sizeof ret->text, "%s", c->group.text);
    }
    const bool lost = c->lost;
    pthread_mutex_unlock(&c->lock);
    return some || lost;
}

bool lg_cluster_finish(lg_cluster *c)
{
    pthread_mutex_lock(&c->lock);
    const bool first = !c->group.done;
    lg_group_finish(&c->group);
    if (first) c->next_beat_ns = 0; /* the others wait for this word */
    const bool finished = lg_group_is_finished(&c->group, lg_now_ns());
    pthread_mutex_unlock(&c->lock);
    if (first) wake(c);
    return finished;
}

int lg_cluster_take(lg_cluster *c)
{
    unsigned news = 0;
    pthread_mutex_lock(&c->lock);
    const int rc = lg_group_take(&c->group, lg_now_ns(), &news);
    lg_cluster_obey(c, news);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

bool lg_cluster_order(lg_cluster *c, struct lg_question *ret, uint64_t *ret_order)
{
    pthread_mutex_lock(&c->lock);
    const bool some = lg_answers_take_order(c->answers, ret, ret_order);
    pthread_mutex_unlock(&c->lock);
    return some;
}

void lg_cluster_answer(lg_cluster *c, uint64_t order, int code, const char *text)
{
    pthread_mutex_lock(&c->lock);
    lg_answers_end_order(c->answers, order, code, text);
    pthread_mutex_unlock(&c->lock);
    wake(c);
}
