/* The ledger against the data set; see look.h. */
#include "base/fs.h"
#include "base/printable.h"
#include "config/ledger.h"
#include "config/manifest.h"
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
    uint64_t *came; /* (items): epoch in which it came last, + 1; 0: not yet */
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
        lg_source_open(k->config->data_path,
                       &(struct lg_source_options){.need_caption = k->plan.n_texts > 0,
                                                   .need_label = k->plan.num_classes > 0},
                       &k->source) < 0) {
        lg_err_clear();
        return 0;
    }
    const uint64_t count = lg_source_count(k->source);
    LG_TRY(lg_path(cache, "%s/sizes", k->dir));
    LG_TRY(lg_source_sizes(k->source, cache, &size));
    int rc = lg_loader_order(&k->plan, size, count, &k->order);
    free(size);
    LG_TRY(rc);
    *ret_same =
        part->items == count && part->hash == lg_order_hash(k->order, lg_source_hash(k->source));
    k->rule = (struct lg_sample_rule){.seed = (uint64_t)k->config->job_seed,
                                      .first = part->first,
                                      .epoch = part->epoch,
                                      .order = k->order,
                                      .buckets = &k->plan.buckets,
                                      .no_shuffle = !k->config->data_shuffle};
    k->came = calloc(count, sizeof *k->came);
    return k->came ? 0 : LG_FAIL(LG_ERR_NOSPACE, "no memory for %" PRIu64 " items", count);
}

/* Adds a sample's key to the step's hash. */
static int add_sample(struct checked *k, XXH3_state_t *h, uint64_t n)
{
    const struct lg_order_place at = lg_source_place(k->source, &k->rule, n);
    char key[LG_PATH_BYTES];
    uint64_t key_hash = 0;
    if (at.item != LG_ITEM_ABSENT) {
        if (k->came[at.item] == at.epoch + 1)
            return LG_FAIL(LG_ERR_CORRUPT,
                           "sample %" PRIu64 " is an item that epoch %" PRIu64 " has had", n,
                           at.epoch);
        k->came[at.item] = at.epoch + 1;
        lg_source_key(k->source, at.item, key);
        key_hash = lg_hash(key, strlen(key));
    }
    XXH3_64bits_update(h, &key_hash, sizeof key_hash);
    return 0;
}

static int check_step(struct checked *k, const struct lg_ledger_record *r, XXH3_state_t *h)
{
    XXH3_64bits_reset(h);
    for (uint64_t n = r->first; n <= r->last; n++) LG_TRY(add_sample(k, h, n));
    if (XXH3_64bits_digest(h) == r->keys_hash) return 0;
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
            *ret_first = LG_MIN(*ret_first, s);
            rc = check_step(k, &r, h);
        }
    }
    XXH3_freeState(h);
    close(fd);
    return rc;
}

static int check(struct checked *k)
{
    bool same;
    uint64_t first = UINT64_MAX;
    LG_TRY(open_run(k));
    if (!k->plan.buckets.n) return LG_FAIL(LG_ERR_USAGE, "%s has no buckets", k->dir);
    LG_TRY(open_data(k, &same));
    if (!same) {
        lg_print(stdout, "the items of each step were not compared: the data set that the run was "
                         "trained on is not at data.path\n");
        return 0;
    }
    LG_TRY(check_steps(k, &first));
    if (first != UINT64_MAX)
        lg_print(stdout,
                 "ok  %s: steps %" PRIu64 " to %" PRIu64 ", every item once in an epoch, in its "
                 "bucket\n",
                 k->path, first, k->manifest.step);
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
    free(k);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
