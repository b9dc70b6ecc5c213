/* The ledger against the data set; see look.h. */
#include "base/fs.h"
#include "base/printable.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include "shm/hosts.h"
#include "stages/io/source.h"
#include "stages/loader/look.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

struct checked {
    const char *dir;
    char path[LG_PATH_BYTES]; /* of the ledger */
    lg_config *config;
    lg_plan plan;
    lg_manifest manifest; /* the newest */
    struct lg_sample_rule rule;
    lg_source *source;
    lg_order *order;
    struct came *came; /* (items) */
    struct walk *walk; /* (sources): without buckets */
    bool is_late;      /* the records begin behind the part's first sample */
};

/* An item so far. */
struct came {
    uint64_t epoch; /* in which it came last, + 1; 0: not yet */
    uint64_t times; /* in that epoch */
};

/* How far a source's walk through its items is. */
struct walk {
    uint64_t pass, came; /* of the pass, + 1, as in struct came; and the samples of it */
    uint64_t samples;    /* of all passes */
    bool began_within;   /* the first pass that is seen may be a part of one */
};

static int open_run(struct checked *k)
{
    char path[LG_PATH_BYTES], newest[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/config.toml", k->dir));
    LG_TRY(lg_config_load(path, NULL, 0, &k->config));
    LG_TRY(lg_path(path, "%s/plan.json", k->dir));
    LG_TRY(lg_plan_load(path, &k->plan));
    LG_TRY(lg_path(path, "%s/checkpoints", k->dir));
    LG_TRY(lg_manifest_newest(path, k->config->job_name, newest, &k->manifest));
    LG_TRY(lg_path(k->path, "%s/ledger", k->dir));
    return 0;
}

/* Opens the data set; false: it is not the run's. */
static int open_data(struct checked *k, bool *ret_same)
{
    struct lg_item_size *size = NULL;
    char cache[LG_PATH_BYTES];
    const struct lg_data_part *part = &k->manifest.data[LG_MAX(k->manifest.n_data, 1) - 1];
    *ret_same = false;
    if (!k->manifest.n_data ||
        lg_source_open_data(k->config,
                            &(struct lg_source_options){.need_caption = k->plan.n_texts > 0,
                                                        .need_label = k->plan.num_classes > 0},
                            &k->source) < 0) {
        lg_err_clear();
        return 0;
    }
    const uint64_t count = lg_source_count(k->source);
    uint64_t hash = lg_source_hash(k->source);
    if (k->plan.buckets.n) {
        LG_TRY(lg_path(cache, "%s/sizes", k->dir));
        LG_TRY(lg_source_sizes(k->source, cache, &size));
        int rc = lg_loader_order(k->config, &k->plan, k->source, size, &k->order);
        free(size);
        LG_TRY(rc);
        hash = lg_order_hash(k->order, hash);
    }
    *ret_same = part->items == count && part->hash == hash;
    k->rule = (struct lg_sample_rule){.seed = (uint64_t)k->config->job_seed,
                                      .first = part->first,
                                      .epoch = part->epoch,
                                      .order = k->order,
                                      .buckets = &k->plan.buckets,
                                      .no_shuffle = !k->config->data_shuffle};
    k->came = calloc(count, sizeof *k->came);
    k->walk = calloc((size_t)lg_source_parts(k->source), sizeof *k->walk);
    return k->came && k->walk ? 0
                              : LG_FAIL(LG_ERR_NOSPACE, "no memory for %" PRIu64 " items", count);
}

/* It has come no more often than it is to come in an epoch. */
static int check_item(struct checked *k, const struct lg_order_place *at, uint64_t n)
{
    struct came *c = &k->came[at->item];
    const int source = lg_source_part_of(k->source, at->item);
    const uint64_t most = k->order ? lg_source_part(k->source, source).repeats : 1;
    if (c->epoch != at->epoch + 1) *c = (struct came){.epoch = at->epoch + 1};
    if (++c->times > most)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "sample %" PRIu64 " is an item that epoch %" PRIu64 " has had", n,
                       at->epoch);
    return 0;
}

/* A source begins a pass when it has ended the one before, and has had its share so far. */
static int check_source(struct checked *k, const struct lg_order_place *at, uint64_t n)
{
    const int i = lg_source_part_of(k->source, at->item);
    const uint64_t count = lg_source_part(k->source, i).count;
    struct walk *w = &k->walk[i];
    const bool is_first = !w->pass, ended = w->came == count || w->began_within;
    if (w->pass != at->epoch + 1) {
        if (!is_first && (!ended || w->pass != at->epoch))
            return LG_FAIL(LG_ERR_CORRUPT,
                           "sample %" PRIu64 " begins pass %" PRIu64
                           " of data.source[%d], of whose "
                           "pass before it %" PRIu64 " of %" PRIu64 " items have come",
                           n, at->epoch, i, w->came, count);
        *w = (struct walk){
            .pass = at->epoch + 1, .samples = w->samples, .began_within = is_first && k->is_late};
    }
    w->came++;
    w->samples++;
    return 0;
}

/* Adds a sample's key to the step's hash. */
static int add_sample(struct checked *k, XXH3_state_t *h, uint64_t n)
{
    const struct lg_order_place at = lg_source_place(k->source, &k->rule, n);
    char key[LG_PATH_BYTES];
    uint64_t key_hash = 0;
    if (at.item != LG_ITEM_ABSENT) {
        LG_TRY(check_item(k, &at, n));
        if (!k->order) LG_TRY(check_source(k, &at, n));
        lg_source_key(k->source, at.item, key);
        key_hash = lg_hash(key, strlen(key));
    }
    XXH3_64bits_update(h, &key_hash, sizeof key_hash);
    return 0;
}

/* Of several hosts the hash is that of theirs, each of its own part (shm/hosts.h). */
static int check_step(struct checked *k, const struct lg_ledger_record *r, XXH3_state_t *h)
{
    uint64_t of_host[LG_HOSTS_MAX], n = r->first;
    const int hosts = k->plan.hosts;
    const uint64_t share = (r->last - r->first + 1) / (uint64_t)hosts;
    for (int i = 0; i < hosts; i++) {
        XXH3_64bits_reset(h);
        for (uint64_t end = n + share; n < end; n++) LG_TRY(add_sample(k, h, n));
        of_host[i] = XXH3_64bits_digest(h);
    }
    const uint64_t all =
        hosts > 1 ? XXH3_64bits(of_host, (size_t)hosts * sizeof *of_host) : of_host[0];
    if (all == r->keys_hash) return 0;
    return LG_FAIL(LG_ERR_CORRUPT,
                   "%s: step %" PRIu64 " was trained on other items than the order of samples says",
                   k->path, r->step);
}

/* The records themselves are lgsup's to check. */
static int check_steps(struct checked *k, uint64_t *ret_first)
{
    const uint64_t batch = (uint64_t)k->plan.batch;
    int fd = open(k->path, O_RDONLY | O_CLOEXEC), rc = 0;
    if (fd < 0) return LG_FAIL(lg_err_from_errno(errno), "cannot open %s", k->path);
    XXH3_state_t *h = XXH3_createState();
    LG_ASSERT(h);
    for (uint64_t s = k->rule.first / batch; s < k->manifest.step && rc == 0; s++) {
        struct lg_ledger_record r;
        if (pread(fd, &r, sizeof r, (off_t)(s * sizeof r)) != (ssize_t)sizeof r)
            rc = LG_FAIL(LG_ERR_CORRUPT, "%s ends before step %" PRIu64, k->path, s + 1);
        else if (r.step && (r.first != s * batch || r.last != (s + 1) * batch - 1))
            rc = LG_FAIL(LG_ERR_CORRUPT, "%s: the record of step %" PRIu64 " has other samples",
                         k->path, s + 1);
        else if (r.step) {
            if (*ret_first == UINT64_MAX) {
                *ret_first = s;
                k->is_late = r.first > k->rule.first;
            }
            rc = check_step(k, &r, h);
        }
    }
    XXH3_freeState(h);
    close(fd);
    return rc;
}

static uint64_t all_samples(const struct checked *k)
{
    uint64_t all = 0;
    for (int i = 0; i < lg_source_parts(k->source); i++) all += k->walk[i].samples;
    return all;
}

/* Of any stretch of a run each source has its share, but for two samples for each source that has a say in it: one at either
 * end. */
static int check_shares(const struct checked *k)
{
    const double all = (double)all_samples(k);
    for (int i = 0; i < lg_source_parts(k->source); i++) {
        const double share = lg_source_part(k->source, i).share,
                     off = (double)k->walk[i].samples - share * all;
        if (off > 2 * (i + 1) || off < -2 * (i + 1))
            return LG_FAIL(LG_ERR_CORRUPT,
                           "data.source[%d] has had %" PRIu64 " samples of %.0f, its share is %g",
                           i, k->walk[i].samples, all, share);
    }
    return 0;
}

static void print_shares(const struct checked *k, uint64_t first)
{
    lg_print(stdout,
             "ok  %s: steps %" PRIu64 " to %" PRIu64 ", every source by turns all of its items; "
             "samples",
             k->path, first, k->manifest.step);
    for (int i = 0; i < lg_source_parts(k->source); i++)
        printf("%s %" PRIu64, i ? "," : "", k->walk[i].samples);
    putchar('\n');
}

static int check(struct checked *k)
{
    bool same;
    uint64_t first = UINT64_MAX;
    LG_TRY(open_run(k));
    if (!k->plan.buckets.n && !k->config->data_source.n)
        return LG_FAIL(LG_ERR_USAGE, "%s has neither buckets nor sources", k->dir);
    LG_TRY(open_data(k, &same));
    if (!same) {
        lg_print(stdout,
                 "the items of each step were not compared: the data set that the run was "
                 "trained on is not at %s\n",
                 lg_config_data(k->config));
        return 0;
    }
    LG_TRY(check_steps(k, &first));
    if (first == UINT64_MAX) return 0;
    if (k->order) {
        lg_print(stdout, "ok  %s: steps %" PRIu64 " to %" PRIu64 ", every item %s, in its bucket\n",
                 k->path, first, k->manifest.step,
                 k->config->data_source.n ? "as often in an epoch as it is to come"
                                          : "once in an epoch");
        return 0;
    }
    LG_TRY(check_shares(k));
    print_shares(k, first);
    return 0;
}

int lg_loader_check_ledger(const char *run_dir)
{
    struct checked *k = calloc(1, sizeof *k);
    LG_ASSERT(k);
    k->dir = run_dir;
    int rc = check(k);
    fflush(stdout);
    lg_source_close(&k->source);
    lg_order_free(&k->order);
    lg_config_free(&k->config);
    free(k->came);
    free(k->walk);
    free(k);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
