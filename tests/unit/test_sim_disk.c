/* Checkpoints, ledger and metrics on a disk that loses power (tests/sim/disk.h): the real
 * publishing, retention, records and choice of what to continue from.
 *
 * A run is lives in a row: each begins as `lgsup start` does, trains on (one record a step), publishes
 * every few steps while the trainer goes on, and ends at a drawn change of the disk by a power cut
 * or by the death of its processes. After every one:
 *   - a start finds a checkpoint at least as new as the newest whose publishing was reported;
 *   - what it finds is whole, and its bytes are those of its step;
 *   - the ledger is complete up to it, metrics.jsonl has a line for every step up to it and no other;
 *   - after retention `keep` checkpoints are left, the newest among them, and no leftovers.
 *
 *     test_sim_disk              everything
 *     test_sim_disk SEED [LIE]   one run, told on stderr (LIE: of enum disk_lie, by number)
 */
#include "base/clock.h"
#include "base/log.h"
#include "config/ledger.h"
#include "stages/ckpt/publish.h"
#include "stages/ckpt/retention.h"
#include "stages/trainer/records.h"
#include "supervisor/run.h"
#include "tests/sim/disk.h"
#include <dirent.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define RUN  "/sim/job/run"
#define NAME "sim"
enum {
    STEPS_MAX = 24,
    LIVES_MAX = 40,
    BATCH = 4,
    RANDOM_MS = 3000,
    RANDOM_SEEDS_MIN = 100,
    LIE_SEEDS_MAX = 400
};

struct world {
    uint64_t seed, rng;
    bool trace, writing; /* writing: a checkpoint, while which the trainer goes on */
    int every, keep;
    lg_run run;
    lg_records *records;
    struct lg_denoiser_config net;
    lg_params params;
    float *values;                         /* w, m, v, ema of one state */
    uint64_t committed, staged, published; /* published: reported as such; 0: none */
    uint64_t hash[STEPS_MAX + 1][LG_MANIFEST_FILES_MAX];
    lg_manifest manifest;
    uint64_t die_at; /* the change that ends this life */
    uint64_t cuts, kills, publishes, resumes, refused;
    jmp_buf failed;
    char why[512];
};

static uint64_t draw(struct world *w, uint64_t below)
{
    w->rng += UINT64_C(0x9e3779b97f4a7c15);
    return lg_hash(&w->rng, sizeof w->rng) % below;
}

static void fail_run(struct world *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3), noreturn));
static void fail_run(struct world *w, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->why, sizeof w->why, fmt, ap);
    va_end(ap);
    if (w->trace) disk_show();
    longjmp(w->failed, 1);
}

static void tell(struct world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void tell(struct world *w, const char *fmt, ...)
{
    va_list ap;
    if (!w->trace) return;
    va_start(ap, fmt);
    fprintf(stderr, "%6" PRIu64 "  ", disk_changes());
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
}

/* ---- what the processes do ---- */

static void append(struct world *w, uint64_t step)
{
    struct lg_step_record r = {
        .ledger = {.step = step + 1,
                   .first = step * BATCH,
                   .last = (step + 1) * BATCH - 1,
                   .keys_hash = lg_hash(&step, sizeof step),
                   .loss = 1.0 / (double)(step + 1)},
        .loss = 1.0 / (double)(step + 1),
        .grad_norm = 1,
        .lr = 1e-3,
    };
    lg_records_append(w->records, &r);
}

/* The trainer goes on while a checkpoint is written. */
static void train_meanwhile(void *arg)
{
    struct world *w = arg;
    if (!w->writing || w->committed >= STEPS_MAX || draw(w, 40)) return;
    disk_refuse(0);
    append(w, w->committed);
    if (!disk_is_dead()) w->committed++;
    disk_refuse(w->refused);
}

static void make_state(struct world *w, uint64_t step)
{
    for (size_t i = 0; i < 4 * w->params.count; i++)
        w->values[i] = (float)((step * 7919 + i * 31) % 4093);
}

static lg_manifest *manifest_of(struct world *w, uint64_t step)
{
    lg_manifest *m = &w->manifest;
    *m = (lg_manifest){.name = NAME,
                       .step = step,
                       .next_n = step * BATCH,
                       .isa = "sse2",
                       .ranks = 1,
                       .threads = 1};
    return m;
}

static struct lg_publishing publishing(const struct world *w)
{
    size_t n = w->params.count;
    const float *v = w->values;
    return (struct lg_publishing){.run_dir = RUN,
                                  .net = &w->net,
                                  .params = &w->params,
                                  .state = {.w = v, .m = v + n, .v = v + 2 * n, .ema = v + 3 * n}};
}

static int publish(struct world *w, uint64_t step)
{
    char dir[LG_PATH_BYTES];
    lg_manifest *m = manifest_of(w, step);
    struct lg_publishing p = publishing(w);
    make_state(w, step);
    LG_TRY(lg_checkpoint_publish(&p, m, dir));
    w->published = LG_MAX(w->published, step);
    w->publishes++;
    tell(w, "published %" PRIu64, step);
    for (int i = 0; i < m->n_files; i++) {
        uint64_t *known = &w->hash[step][i];
        if (*known && *known != m->file[i].hash)
            fail_run(w, "%s of step %" PRIu64 " differs", m->file[i].path, step);
        *known = m->file[i].hash;
    }
    return 0;
}

/* Checkpoints under real names, each of them whole. */
static int count_whole(struct world *w, bool leftovers_allowed)
{
    static lg_manifest there;
    char dir[LG_PATH_BYTES];
    int n = 0;
    DIR *d = opendir(RUN "/checkpoints");
    if (!d) return 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.' && !leftovers_allowed) fail_run(w, "%s was left", e->d_name);
        snprintf(dir, sizeof dir, RUN "/checkpoints/%s", e->d_name);
        if (e->d_name[0] == '.' || !lg_manifest_exists(dir)) continue;
        if (lg_manifest_load(dir, &there) < 0) fail_run(w, "%s is half a checkpoint", e->d_name);
        n++;
    }
    closedir(d);
    return n;
}

static void check_folder(struct world *w)
{
    char dir[LG_PATH_BYTES];
    int complete = count_whole(w, false);
    if (!complete && !w->published) return;
    if (complete > w->keep) fail_run(w, "%d checkpoints are left of %d", complete, w->keep);
    if (lg_manifest_newest(RUN "/checkpoints", NAME, dir, &w->manifest) < 0 ||
        w->manifest.step != w->published)
        fail_run(w, "the newest after retention is not %" PRIu64, w->published);
}

/* Somebody's leftovers under the name that is to come. */
static void plant_junk(struct world *w, uint64_t step)
{
    char dir[LG_PATH_BYTES];
    snprintf(dir, sizeof dir, RUN "/checkpoints/" NAME "_step%" PRIu64 "/model", step);
    if (lg_mkdirs(dir) < 0) return;
    strcat(dir, "/config.json");
    lg_publish_file(dir, "{}", 2);
}

/* A whole checkpoint of the same step, of another history. Nobody dies between this and the next
 * attempt: a start could not tell that it is not its own. */
static void publish_other(struct world *w, uint64_t step)
{
    char dir[LG_PATH_BYTES];
    static lg_manifest there;
    disk_die_at(0);
    make_state(w, step + 1000);
    lg_manifest *m = manifest_of(w, step);
    struct lg_publishing p = publishing(w);
    if (lg_checkpoint_publish(&p, m, dir) < 0) fail_run(w, "%s", lg_err_message());
    if (publish(w, step) < 0) fail_run(w, "%s", lg_err_message());
    if (lg_manifest_load(dir, &there) < 0 || there.file[1].hash != m->file[1].hash)
        fail_run(w, "another's checkpoint of step %" PRIu64 " counts as ours", step);
    disk_die_at(LG_MAX(w->die_at, disk_changes() + 1));
}

static void write_checkpoint(struct world *w)
{
    w->refused = draw(w, 4) ? 0 : 20 + draw(w, 200);
    if (w->staged > w->published && draw(w, 12) == 0) plant_junk(w, w->staged);
    if (w->staged > w->published && w->die_at && !disk_is_dead() && draw(w, 12) == 0)
        publish_other(w, w->staged);
    for (int tries = 0; !disk_is_dead() && w->staged > w->published; tries++) {
        disk_refuse(tries < 20 ? w->refused : 0);
        w->writing = true;
        int rc = publish(w, w->staged);
        w->writing = false;
        if (rc < 0) tell(w, "not published: %s", lg_err_message());
        lg_err_clear();
    }
    disk_refuse(0);
    w->refused = 0;
    if (disk_is_dead()) return;
    if (lg_retention_apply(RUN "/checkpoints", NAME, w->keep) == 0 && !disk_is_dead())
        check_folder(w);
    lg_err_clear();
}

static void live(struct world *w)
{
    uint64_t every = (uint64_t)w->every;
    while (!disk_is_dead() && w->published < STEPS_MAX) {
        if (w->staged > w->published) write_checkpoint(w);
        if (!disk_is_dead() && w->committed < STEPS_MAX) append(w, w->committed);
        if (disk_is_dead()) return; /* the record may be there, the commit is not */
        w->committed = LG_MIN(w->committed + 1, STEPS_MAX);
        if (w->committed / every > w->staged / every || w->committed == STEPS_MAX)
            w->staged = w->committed;
    }
}

/* ---- what a start finds ---- */

static uint64_t newest(struct world *w)
{
    char dir[LG_PATH_BYTES];
    lg_manifest *m = &w->manifest;
    if (lg_manifest_newest(RUN "/checkpoints", NAME, dir, m) < 0) return 0;
    if (lg_manifest_verify(m, dir) < 0) fail_run(w, "torn: %s", lg_err_message());
    if (m->step > w->committed) fail_run(w, "a checkpoint of the future, %" PRIu64, m->step);
    for (int i = 0; i < m->n_files; i++)
        if (w->hash[m->step][i] && w->hash[m->step][i] != m->file[i].hash)
            fail_run(w, "%s of step %" PRIu64 " differs", m->file[i].path, m->step);
    return m->step;
}

static void check_metrics(struct world *w, uint64_t last)
{
    char *text, *rest = NULL;
    size_t bytes;
    uint64_t step = 0, got;
    if (lg_read_file(RUN "/metrics.jsonl", 1 << 20, &text, &bytes) < 0)
        fail_run(w, "metrics.jsonl: %s", lg_err_message());
    if (bytes && text[bytes - 1] != '\n') fail_run(w, "metrics.jsonl ends within a line");
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        if (sscanf(line, "{\"step\": %" SCNu64 ",", &got) != 1 || got != ++step)
            fail_run(w, "metrics.jsonl: line %" PRIu64 " is \"%.60s\"", step, line);
    free(text);
    if (step != last) fail_run(w, "metrics.jsonl ends at %" PRIu64 ", not at %" PRIu64, step, last);
}

/* false: dead before it could begin. */
static bool start(struct world *w, bool machine_lost_power)
{
    lg_run_init(&w->run, RUN);
    if (lg_run_create(&w->run) < 0 || lg_publish_file(RUN "/config.toml", "# effective\n", 12) < 0)
        return false;
    if (machine_lost_power) {
        uint64_t found = newest(w);
        tell(w, "continues from %" PRIu64 ", published %" PRIu64, found, w->published);
        count_whole(w, true);
        if (found < w->published)
            fail_run(w, "continues from %" PRIu64 ", though %" PRIu64 " was published", found,
                     w->published);
        w->committed = w->staged = w->published = found;
        w->resumes++;
    }
    lg_err_clear();
    if (lg_records_open(RUN, w->committed, &w->records) < 0) return false;
    if (disk_is_dead()) return false;
    if (w->published && lg_ledger_verify(RUN "/ledger", 0, w->published, BATCH) < 0)
        fail_run(w, "ledger: %s", lg_err_message());
    check_metrics(w, w->committed);
    return true;
}

static void end_life(struct world *w, int chance)
{
    lg_records_close(&w->records);
    lg_err_clear();
    if (chance >= -1) {
        w->cuts++;
        tell(w, "POWER CUT");
        disk_power_loss(chance);
    } else {
        w->kills++;
        tell(w, "KILLED");
        disk_revive();
    }
}

/* ---- runs ---- */

static void open_world(struct world *w, uint64_t seed, enum disk_lie lie)
{
    w->seed = w->rng = seed;
    w->every = 1 + (int)draw(w, 4);
    w->keep = 1 + (int)draw(w, 3);
    w->records = NULL;
    w->committed = w->staged = w->published = w->refused = w->die_at = 0;
    memset(w->hash, 0, sizeof w->hash);
    disk_format(seed, lie);
    disk_meanwhile(train_meanwhile, w);
}

static void make_net(struct world *w)
{
    w->net = (struct lg_denoiser_config){.kind = LG_DIT,
                                         .channels = 1,
                                         .height = 2,
                                         .width = 2,
                                         .patch = 1,
                                         .hidden = 4,
                                         .depth = 1,
                                         .heads = 1,
                                         .mlp_ratio = 4,
                                         .num_classes = 1,
                                         .norm_eps = 1e-6};
    LG_ASSERT(lg_denoiser_params(&w->net, &w->params) == 0);
    w->values = malloc(4 * w->params.count * sizeof *w->values);
    LG_ASSERT(w->values);
}

/* Lives until everything is published. */
static void live_on(struct world *w)
{
    bool lost = true;
    uint64_t reach = 20 + draw(w, 1200);
    for (int life = 0; life < LIVES_MAX && w->published < STEPS_MAX; life++) {
        w->die_at = disk_changes() + 1 + draw(w, reach);
        disk_die_at(w->die_at);
        bool began = start(w, lost);
        if (began) live(w);
        if (!disk_is_dead() && w->published < STEPS_MAX) fail_run(w, "%s", lg_err_message());
        bool cut = draw(w, 3) > 0;
        lost = cut || (lost && !began); /* no board: the next start begins with the disk again */
        end_life(w, cut ? -1 : -2);
    }
    w->die_at = 0;
    disk_die_at(0);
    if (!start(w, lost)) fail_run(w, "the last start: %s", lg_err_message());
    live(w);
}

/* false: w->why. */
static bool run_seed(struct world *w, uint64_t seed, enum disk_lie lie)
{
    open_world(w, seed, lie);
    int failed = setjmp(w->failed);
    if (!failed) live_on(w);
    lg_records_close(&w->records);
    return !failed;
}

/* One life, cut at change `at` (0: undisturbed), and the start after it. */
static bool run_cut(struct world *w, uint64_t at, int chance)
{
    open_world(w, 11 + at % 2, DISK_HONEST);
    w->every = 5;
    w->keep = 1;
    int failed = setjmp(w->failed);
    if (!failed) {
        disk_die_at(at);
        if (start(w, true)) live(w);
        if (at) end_life(w, chance);
        if (at && !start(w, true)) fail_run(w, "the start after it: %s", lg_err_message());
    }
    lg_records_close(&w->records);
    return !failed;
}

static struct world g;

static int make_world(void **state)
{
    (void)state;
    memset(&g, 0, sizeof g);
    make_net(&g);
    lg_log_set_level(LG_ERROR + 1);
    return 0;
}
static int end_world(void **state)
{
    (void)state;
    disk_format(0, DISK_HONEST);
    lg_params_free(&g.params);
    free(g.values);
    return 0;
}

/* One undisturbed life, cut at each of its changes, with everything lost, kept, and in between. */
static void test_every_change(void **state)
{
    static const int chance[] = {0, 16, 4, 8, 12, -1};
    assert_true(run_cut(&g, 0, 0));
    assert_int_equal(g.published, STEPS_MAX);
    uint64_t end = disk_changes();
    for (uint64_t at = 1; at <= end; at++)
        for (size_t k = 0; k < LG_ARRAY_LEN(chance); k++)
            if (!run_cut(&g, at, chance[k]))
                fail_msg("cut at %" PRIu64 " of %" PRIu64 ", fate %d: %s", at, end, chance[k],
                         g.why);
    print_message("%" PRIu64 " changes, cut at each, %zu fates each\n", end, LG_ARRAY_LEN(chance));
    assert_true(end > 200);
}

static void test_random(void **state)
{
    int64_t began = lg_now_ns();
    uint64_t seed = 1;
    g.cuts = g.kills = g.publishes = g.resumes = 0;
    for (; seed <= RANDOM_SEEDS_MIN || lg_now_ns() - began < RANDOM_MS * LG_MS_NS; seed++)
        if (!run_seed(&g, seed, DISK_HONEST))
            fail_msg("%s\nreplay with: test_sim_disk %" PRIu64, g.why, seed);
    double s = (double)(lg_now_ns() - began) / LG_S_NS;
    print_message("%" PRIu64 " runs, %" PRIu64 " power cuts and %" PRIu64
                  " deaths (%.0f/s), %" PRIu64 " checkpoints\n",
                  seed - 1, g.cuts, g.kills, (double)(g.cuts + g.kills) / s, g.publishes);
    assert_true(g.cuts > seed && g.kills > seed && g.publishes > seed);
}

/* Each promise of the disk is needed: when it is broken, some run must notice. */
static void test_lies(void **state)
{
    for (int lie = DISK_HONEST + 1; lie < DISK_LIES; lie++) {
        uint64_t seed = 1;
        while (seed <= LIE_SEEDS_MAX && run_seed(&g, seed, (enum disk_lie)lie)) seed++;
        print_message("lie %d: %s (seed %" PRIu64 ")\n", lie,
                      seed <= LIE_SEEDS_MAX ? g.why : "MISSED", seed);
        assert_true(seed <= LIE_SEEDS_MAX);
    }
}

static int replay(int argc, char **argv)
{
    make_world(NULL);
    g.trace = true;
    bool passed = run_seed(&g, strtoull(argv[1], NULL, 10),
                           argc > 2 ? (enum disk_lie)atoi(argv[2]) : DISK_HONEST);
    printf("seed %s: %s\n", argv[1], passed ? "passed" : g.why);
    return !passed;
}

int main(int argc, char **argv)
{
    if (argc > 1) return replay(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_change),
                                       cmocka_unit_test(test_random), cmocka_unit_test(test_lies)};
    return cmocka_run_group_tests(tests, make_world, end_world);
}
