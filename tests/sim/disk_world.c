/* See disk_world.h. What was found well once is not looked at again: a start depends on the disk's
 * contents alone, and its choice of a checkpoint on the folder of checkpoints alone. */
#include "tests/sim/disk_world.h"
#include "base/clock.h"
#include "base/log.h"
#include "stages/ckpt/retention.h"
#include <dirent.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RUN  "/sim/job/run"
#define NAME "sim"
enum { LIVES_MAX = 40, BATCH = 4, KNOWN_MAX = 1 << 16, OURS = 0x0a, OTHERS = 0x0b };

/* Contents that were found well, by their hash. */
struct known {
    uint64_t of, found;
    uint32_t world; /* in which; others' do not count */
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
                   .loss = 1.0 / (double)(step + 1),
                   .lineage = OURS},
        .loss = 1.0 / (double)(step + 1),
        .grad_norm = 1,
        .lr = 1e-3,
    };
    lg_records_append(w->now.records, &r);
}

/* The trainer goes on while a checkpoint is written. */
static void train_meanwhile(struct world *w)
{
    if (!w->writing || w->now.committed >= DISK_STEPS_MAX || draw(w, 40)) return;
    disk_refuse(0);
    append(w, w->now.committed);
    if (!disk_is_dead()) w->now.committed++;
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
                       .lineage = OURS,
                       .isa = "sse2",
                       .ranks = 1,
                       .threads = 1};
    return m;
}

static struct lg_publishing publishing(const struct world *w)
{
    size_t n = w->params.count;
    float *v = w->values;
    return (struct lg_publishing){
        .run_dir = RUN,
        .contents = {.net = &w->net,
                     .params = &w->params,
                     .state = {.w = v, .moments = {.m = v + n, .v = v + 2 * n}, .ema = v + 3 * n}}};
}

static int publish(struct world *w, uint64_t step)
{
    char dir[LG_PATH_BYTES];
    lg_manifest *m = manifest_of(w, step);
    struct lg_publishing p = publishing(w);
    make_state(w, step);
    LG_TRY(lg_checkpoint_publish(&p, m, dir));
    w->now.published = LG_MAX(w->now.published, step);
    w->count.publishes++;
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
    int n = 0, others = 0;
    DIR *d = opendir(RUN "/checkpoints");
    if (!d) return 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.' && !leftovers_allowed) fail_run(w, "%s was left", e->d_name);
        snprintf(dir, sizeof dir, RUN "/checkpoints/%s", e->d_name);
        if (e->d_name[0] == '.' || !lg_manifest_exists(dir)) continue;
        if (lg_manifest_load(dir, &there) < 0)
            fail_run(w, "%s is half a checkpoint: %s", e->d_name, lg_err_message());
        if (there.lineage == OURS)
            n++;
        else
            others++;
    }
    closedir(d);
    if (others < w->now.others)
        fail_run(w, "%d of %d checkpoints of another run are gone", w->now.others - others,
                 w->now.others);
    return n;
}

static void check_folder(struct world *w)
{
    char dir[LG_PATH_BYTES];
    int complete = count_whole(w, false);
    if (!complete && !w->now.published) return;
    if (complete > w->keep) fail_run(w, "%d checkpoints are left of %d", complete, w->keep);
    if (lg_manifest_newest(RUN "/checkpoints", NAME, dir, &w->manifest) < 0 ||
        w->manifest.step != w->now.published)
        fail_run(w, "the newest after retention is not %" PRIu64, w->now.published);
}

/* A predecessor may have taken it and died before it said so. Somebody who copies files here puts nothing in the place
 * of such a checkpoint, and another run does not start in this folder. */
static bool is_name_free(uint64_t step)
{
    char dir[LG_PATH_BYTES];
    snprintf(dir, sizeof dir, RUN "/checkpoints/" NAME "_step%" PRIu64, step);
    return !lg_path_exists(dir);
}

/* Somebody's leftovers under the name that is to come. */
static void plant_junk(struct world *w, uint64_t step)
{
    char dir[LG_PATH_BYTES];
    if (!is_name_free(step)) return;
    snprintf(dir, sizeof dir, RUN "/checkpoints/" NAME "_step%" PRIu64 "/model", step);
    if (lg_mkdirs(dir) < 0) return;
    strcat(dir, "/config.json");
    lg_publish_file(dir, "{}", 2);
}

/* A whole checkpoint of the same step, of another run, which has to stay. Nobody dies between this and the
 * next attempt: a start would refuse the folder (supervisor/run/folder.h). */
static void publish_other(struct world *w, uint64_t step)
{
    char dir[LG_PATH_BYTES];
    static lg_manifest there;
    if (!is_name_free(step)) return;
    disk_die_at(0);
    make_state(w, step + 1000);
    lg_manifest *m = manifest_of(w, step);
    struct lg_publishing p = publishing(w);
    m->lineage = OTHERS;
    if (lg_checkpoint_publish(&p, m, dir) < 0) fail_run(w, "%s", lg_err_message());
    w->now.others++;
    if (publish(w, step) < 0) fail_run(w, "%s", lg_err_message());
    if (lg_manifest_load(dir, &there) < 0 || there.file[1].hash != m->file[1].hash)
        fail_run(w, "another's checkpoint of step %" PRIu64 " counts as ours", step);
    disk_die_at(LG_MAX(w->die_at, disk_changes() + 1));
}

static void write_checkpoint(struct world *w)
{
    w->refused = draw(w, 4) ? 0 : 20 + draw(w, 200);
    if (w->now.staged > w->now.published && draw(w, 12) == 0) plant_junk(w, w->now.staged);
    if (w->now.staged > w->now.published && w->die_at && !disk_is_dead() && draw(w, 12) == 0)
        publish_other(w, w->now.staged);
    for (int tries = 0; !disk_is_dead() && w->now.staged > w->now.published; tries++) {
        disk_refuse(tries < 20 ? w->refused : 0);
        w->writing = true;
        int rc = publish(w, w->now.staged);
        w->writing = false;
        if (rc < 0) tell(w, "not published: %s", lg_err_message());
        lg_err_clear();
    }
    disk_refuse(0);
    w->refused = 0;
    if (disk_is_dead()) return;
    const struct lg_retention r = {
        .dir = RUN "/checkpoints", .newest = manifest_of(w, w->now.published), .keep = w->keep};
    if (lg_retention_apply(&r) == 0 && !disk_is_dead()) check_folder(w);
    lg_err_clear();
}

void live(struct world *w)
{
    uint64_t every = (uint64_t)w->every;
    while (!disk_is_dead() && w->now.published < DISK_STEPS_MAX) {
        if (w->now.staged > w->now.published) write_checkpoint(w);
        if (!disk_is_dead() && w->now.committed < DISK_STEPS_MAX) append(w, w->now.committed);
        if (disk_is_dead()) return; /* the record may be there, the commit is not */
        w->now.committed = LG_MIN(w->now.committed + 1, DISK_STEPS_MAX);
        if (w->now.committed / every > w->now.staged / every || w->now.committed == DISK_STEPS_MAX)
            w->now.staged = w->now.committed;
    }
}

/* ---- what a start finds ---- */

static struct known *known(uint64_t of)
{
    static struct known all[KNOWN_MAX];
    return &all[of % KNOWN_MAX];
}

static bool is_known(const struct world *w, const struct known *k, uint64_t of)
{
    return k->of == of && k->world == w->world;
}

static uint64_t choose(struct world *w)
{
    char dir[LG_PATH_BYTES];
    lg_manifest *m = &w->found;
    count_whole(w, true);
    if (lg_manifest_newest(RUN "/checkpoints", NAME, dir, m) < 0) return 0;
    if (lg_manifest_verify(m, dir) < 0) fail_run(w, "torn: %s", lg_err_message());
    for (int i = 0; i < m->n_files; i++)
        if (w->hash[m->step][i] && w->hash[m->step][i] != m->file[i].hash)
            fail_run(w, "%s of step %" PRIu64 " differs", m->file[i].path, m->step);
    return m->step;
}

static uint64_t newest(struct world *w)
{
    uint64_t of = disk_hash(RUN "/checkpoints");
    struct known *k = known(of);
    if (is_known(w, k, of))
        w->count.choices_known++;
    else
        *k = (struct known){.of = of, .world = w->world, .found = choose(w)};
    if (k->found > w->now.committed) fail_run(w, "a checkpoint of the future, %" PRIu64, k->found);
    return k->found;
}

static void check_metrics(struct world *w, uint64_t last)
{
    char *text, want[32];
    size_t bytes;
    uint64_t step = 0;
    if (lg_read_file(RUN "/metrics.jsonl", 1 << 20, &text, &bytes) < 0)
        fail_run(w, "metrics.jsonl: %s", lg_err_message());
    if (bytes && text[bytes - 1] != '\n') fail_run(w, "metrics.jsonl ends within a line");
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        int n = snprintf(want, sizeof want, "{\"step\": %" PRIu64 ",", ++step);
        if (strncmp(line, want, (size_t)n))
            fail_run(w, "metrics.jsonl: line %" PRIu64 " is \"%.60s\"", step, line);
        if (strlen(line) == strcspn(line, "\n")) fail_run(w, "metrics.jsonl has a hole");
    }
    free(text);
    if (step != last) fail_run(w, "metrics.jsonl ends at %" PRIu64 ", not at %" PRIu64, step, last);
}

/* false: dead before it could begin. */
bool start(struct world *w, bool machine_lost_power)
{
    w->now.no_board = machine_lost_power;
    lg_run_init(&w->now.run, RUN);
    if (lg_run_create(&w->now.run) < 0 ||
        lg_publish_file(RUN "/config.toml", "# effective\n", 12) < 0)
        return false;
    if (machine_lost_power) {
        uint64_t found = newest(w);
        tell(w, "continues from %" PRIu64 ", published %" PRIu64, found, w->now.published);
        if (found < w->now.published)
            fail_run(w, "continues from %" PRIu64 ", though %" PRIu64 " was published", found,
                     w->now.published);
        w->now.committed = w->now.staged = w->now.published = found;
        w->now.no_board = false;
        w->count.resumes++;
    }
    lg_err_clear();
    if (lg_records_open(RUN, w->now.committed, &w->now.records) < 0) return false;
    if (lg_records_cut(w->now.records) < 0) return false; /* as the first record does */
    if (disk_is_dead()) return false;
    if (w->now.published &&
        lg_ledger_verify(RUN "/ledger",
                         &(struct lg_ledger_check){0, w->now.published, BATCH, OURS}) < 0)
        fail_run(w, "ledger: %s", lg_err_message());
    check_metrics(w, w->now.committed);
    return true;
}

/* Another future: a start of what is left, whose success is forgotten again. */
static void start_there(void *arg)
{
    struct world *w = arg;
    struct life now = w->now;
    uint64_t of = disk_hash("/sim") ^ now.published << 48 ^ now.committed << 40 ^
                  (uint64_t)w->lost_power << 32;
    struct known *k = known(of);
    w->count.futures++;
    w->count.future_deaths += !w->lost_power;
    if (is_known(w, k, of)) {
        w->count.known++;
        return;
    }
    w->now.records = NULL;
    if (!start(w, w->lost_power)) fail_run(w, "the start after it: %s", lg_err_message());
    lg_records_close(&w->now.records);
    w->now = now;
    *k = (struct known){.of = of, .world = w->world};
}

void look_at_futures(struct world *w)
{
    bool told = w->trace;
    w->trace = false;
    for (int i = 0; i < w->n_fates; i++) {
        w->lost_power = w->fate[i] != DISK_DEATH || w->now.no_board;
        disk_what_if(w->fate[i], start_there, w);
    }
    w->trace = told;
}

/* Before every change of the disk. */
static void meanwhile(void *arg)
{
    struct world *w = arg;
    look_at_futures(w);
    train_meanwhile(w);
}

static void end_life(struct world *w, int chance)
{
    lg_records_close(&w->now.records);
    lg_err_clear();
    if (chance >= -1) {
        w->count.cuts++;
        tell(w, "POWER CUT");
        disk_power_loss(chance);
    } else {
        w->count.kills++;
        tell(w, "KILLED");
        disk_revive();
    }
}

/* ---- runs ---- */

void open_world(struct world *w, uint64_t seed, enum disk_lie lie)
{
    w->seed = w->rng = seed;
    w->every = 1 + (int)draw(w, 4);
    w->keep = 1 + (int)draw(w, 3);
    static const int fates[] = {0, 16, -1, -1, DISK_DEATH};
    w->now = (struct life){0};
    w->refused = w->die_at = 0;
    w->writing = false;
    w->world++;
    w->fate = fates;
    w->n_fates = seed % 4 == 1 ? LG_ARRAY_LEN(fates) : 0; /* lives without are many more */
    memset(w->hash, 0, sizeof w->hash);
    disk_format(seed, lie);
    disk_meanwhile(meanwhile, w);
}

void make_net(struct world *w)
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
void live_on(struct world *w)
{
    bool lost = true;
    uint64_t reach = 20 + draw(w, 1200);
    for (int life = 0; life < LIVES_MAX && w->now.published < DISK_STEPS_MAX; life++) {
        w->die_at = disk_changes() + 1 + draw(w, reach);
        disk_die_at(w->die_at);
        if (start(w, lost)) live(w);
        if (!disk_is_dead() && w->now.published < DISK_STEPS_MAX)
            fail_run(w, "%s", lg_err_message());
        bool cut = draw(w, 3) > 0;
        lost = cut || w->now.no_board;
        end_life(w, cut ? -1 : -2);
    }
    w->die_at = 0;
    disk_die_at(0);
    if (!start(w, lost)) fail_run(w, "the last start: %s", lg_err_message());
    live(w);
}
