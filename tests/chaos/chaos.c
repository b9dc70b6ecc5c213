/* chaos: a crash campaign over a pipeline; see README.md.
 *
 *     chaos --build DIR --pipeline FILE --home DIR [--kills N] [--seed S] [--jobs J] [--steps N]
 *           [--gap MS] [--seconds S] [--commit TEXT] [--tar SHARD] [--only FAULT]
 *     chaos --report OUT [--notes FILE] HOME...
 *
 * HOME keeps records.jsonl, one line a run. A campaign that is interrupted goes on with the next run;
 * it is done when its records count N kills. Runs that failed are kept as HOME/failed.<run>. Exit
 * code 0: every run ended with the bytes of the undisturbed one; 1: some did not; 2: usage. */
#include "tests/chaos/chaos.h"
#include "base/clock.h"
#include "config/config.h"
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    JOBS_MAX = 64,
    FAILED_MAX = 10,
    RECORDS_BYTES_MAX = 1 << 30,
    DATA_BYTES_MAX = 64 << 20,
    OTHERS_KEPT = 2
};

struct campaign {
    struct chaos_options o;
    int64_t next, kills, failed, began_ns;
    pid_t worker[JOBS_MAX];
};

static volatile sig_atomic_t interrupted;
static void on_interrupt(int sig)
{
    (void)sig;
    interrupted = 1;
}
bool chaos_interrupted(void)
{
    return interrupted;
}

static int usage(void)
{
    fprintf(
        stderr,
        "usage: chaos --build DIR --pipeline FILE --home DIR [--kills N] [--seed S] [--jobs J]\n"
        "             [--steps N] [--gap MS] [--seconds S] [--commit TEXT] [--tar SHARD]\n"
        "             [--only FAULT]\n"
        "       chaos --report OUT [--notes FILE] HOME...\n");
    return 2;
}

/* ---- options ---- */

static bool take(struct chaos_options *o, const char *key, const char *value)
{
    char path[PATH_MAX];
    const char *absolute = realpath(value, path) ? path : value;
    struct {
        const char *key;
        int64_t *number;
    } numbers[] = {{"--kills", &o->kills},
                   {"--jobs", &o->jobs},
                   {"--steps", &o->steps},
                   {"--gap", &o->gap_ms},
                   {"--seconds", &o->seconds_max}};
    for (size_t i = 0; i < LG_ARRAY_LEN(numbers); i++)
        if (!strcmp(key, numbers[i].key)) {
            *numbers[i].number = strtoll(value, NULL, 10);
            return *numbers[i].number > 0;
        }
    if (!strcmp(key, "--seed"))
        o->seed = strtoull(value, NULL, 10);
    else if (!strcmp(key, "--build"))
        return lg_path(o->bin, "%s/bin", absolute) == 0 &&
               lg_path(o->tools, "%s/tests/chaos", absolute) == 0;
    else if (!strcmp(key, "--pipeline"))
        return lg_path(o->pipeline, "%s", absolute) == 0;
    else if (!strcmp(key, "--home"))
        return lg_mkdirs(value) == 0 && realpath(value, path) && lg_path(o->home, "%s", path) == 0;
    else if (!strcmp(key, "--commit"))
        o->commit = value;
    else if (!strcmp(key, "--tar"))
        o->tar = strdup(absolute);
    else if (!strcmp(key, "--only"))
        o->only = value;
    else
        return false;
    return true;
}

static int64_t tree_bytes;
static int add_bytes(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)path, (void)type, (void)ftw;
    tree_bytes += st->st_size;
    return 0;
}

/* Each run gets a copy of its own. */
static bool is_small_folder(const char *path)
{
    struct stat st;
    tree_bytes = 0;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) &&
           nftw(path, add_bytes, 16, FTW_PHYS) == 0 && tree_bytes <= DATA_BYTES_MAX;
}

/* Which item a sample is follows from it. */
static int read_order(const lg_config *c, struct chaos_options *o)
{
    lg_plan p;
    LG_TRY(lg_plan_make(c, NULL, &p));
    o->ranks = p.instances[LG_ROLE_trainer] / p.sequence;
    o->micro = p.micro_batch;
    lg_buckets_print(&p.buckets, o->buckets);
    return 0;
}

static int read_pipeline(struct chaos_options *o)
{
    lg_config *c = NULL;
    LG_TRY(lg_config_load(o->pipeline, NULL, 0, &c));
    if (o->steps == 0) o->steps = c->trainer_max_steps;
    o->batch = c->trainer_global_batch_size;
    o->has_modes = o->batch * c->parallel_sp / c->trainer_ranks == c->trainer_micro_batch_size;
    o->data_seed = c->job_seed;
    o->every = c->checkpoint_every;
    snprintf(o->name, sizeof o->name, "%s", c->job_name);
    if (is_small_folder(c->data_path)) snprintf(o->data, sizeof o->data, "%s", c->data_path);
    int rc = read_order(c, o);
    lg_config_free(&c);
    LG_TRY(rc);
    return 0;
}

/* ---- records ---- */

static int read_records(struct campaign *c)
{
    char path[LG_PATH_BYTES], *text, *rest = NULL;
    size_t bytes;
    LG_TRY(lg_path(path, "%s/records.jsonl", c->o.home));
    if (!lg_path_exists(path)) return 0;
    LG_TRY(lg_read_file(path, RECORDS_BYTES_MAX, &text, &bytes));
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        cJSON *j = cJSON_Parse(line);
        const cJSON *kills = cJSON_GetObjectItem(j, "kills"), *run = cJSON_GetObjectItem(j, "run");
        const cJSON *why = cJSON_GetObjectItem(j, "why");
        if (kills && run && why) {
            c->kills += (int64_t)kills->valuedouble;
            c->next = LG_MAX(c->next, (int64_t)run->valuedouble + 1);
            c->failed += why->valuestring[0] != 0;
        }
        cJSON_Delete(j);
    }
    free(text);
    return 0;
}

static void append_record(struct campaign *c, const char *line)
{
    char path[LG_PATH_BYTES];
    LG_ASSERT(lg_path(path, "%s/records.jsonl", c->o.home) == 0);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    LG_ASSERT(fd >= 0 && lg_write_all(fd, line, strlen(line)) == 0);
    close(fd);
}

/* ---- what the runs are compared with ---- */

/* Of every program and of what the run is made from: sites and reference belong to it. */
static int build_hash(const struct chaos_options *o, uint64_t *ret)
{
    char pattern[LG_PATH_BYTES];
    uint64_t all[2] = {(uint64_t)o->steps, 0}, one, bytes;
    glob_t g = {0};
    LG_TRY(lg_hash_file(o->pipeline, &one, &bytes));
    all[1] = one;
    const char *const patterns[] = {"%s/lg*", "%s/../lib/liblg-host.so",
                                    "%s/../tests/chaos/libchaos.so"};
    for (size_t k = 0; k < LG_ARRAY_LEN(patterns); k++) {
        LG_TRY(lg_path(pattern, patterns[k], o->bin));
        if (glob(pattern, k ? GLOB_APPEND : 0, NULL, &g) != 0)
            return LG_FAIL(LG_ERR_NOTFOUND, "no programs in %s: make all first", o->bin);
    }
    for (size_t i = 0; i < g.gl_pathc; i++) {
        if (lg_hash_file(g.gl_pathv[i], &one, &bytes) < 0) continue;
        all[1] ^= one;
        all[1] = lg_hash(all, sizeof all);
    }
    globfree(&g);
    lg_err_clear();
    *ret = all[1];
    return 0;
}

static void forget_other_sites(const struct chaos_options *o, uint64_t build)
{
    for (int k = 0; k < o->jobs; k++) {
        char path[LG_PATH_BYTES];
        uint64_t there = 0;
        LG_ASSERT(lg_path(path, "%s/control.%d", o->home, k) == 0);
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        LG_ASSERT(fd >= 0);
        ssize_t n = pread(fd, &there, sizeof there, offsetof(struct chaos_control, build));
        if (n != (ssize_t)sizeof there || there != build)
            LG_ASSERT(ftruncate(fd, 0) == 0 && ftruncate(fd, sizeof(struct chaos_control)) == 0 &&
                      pwrite(fd, &build, sizeof build, offsetof(struct chaos_control, build)) > 0);
        close(fd);
    }
}

static int run_undisturbed(const struct chaos_options *o, const char *dir, const char *data)
{
    fflush(stdout);
    pid_t pid = fork(); /* a process of its own: it becomes a subreaper */
    if (pid == 0) _exit(chaos_undisturbed(o, dir, data) < 0 ? 1 : 0);
    int status = 1;
    waitpid(pid, &status, 0);
    if (status != 0) return LG_FAIL(LG_ERR_FAILED, "no undisturbed run to compare with");
    return 0;
}

/* HOME/other: a run of the same plan on another data set, of which only the first checkpoints are there.
 * Whoever takes them for the run's own trains on from them to other bytes. */
static int make_other(const struct chaos_options *o)
{
    char dir[LG_PATH_BYTES], data[LG_PATH_BYTES], one[LG_PATH_BYTES];
    LG_TRY(lg_path(dir, "%s/other", o->home));
    LG_TRY(lg_path(data, "%s/other.data", o->home));
    lg_remove_tree(data);
    if (chaos_copy(o->data, data) < 0 || chaos_change_data(data, true) < 0)
        return LG_FAIL(LG_ERR_FAILED, "cannot make another data set in %s", data);
    LG_TRY(run_undisturbed(o, dir, data));
    for (int64_t k = OTHERS_KEPT + 1; o->every && (k - 1) * o->every < o->steps; k++) {
        int64_t step = LG_MIN(k * o->every, o->steps);
        LG_TRY(lg_path(one, "%s/checkpoints/%s_step%" PRId64, dir, o->name, step));
        LG_TRY(lg_remove_tree(one));
    }
    return 0;
}

static int prepare(struct campaign *c)
{
    char dir[LG_PATH_BYTES], mark[LG_PATH_BYTES], line[32], *text = NULL;
    uint64_t build;
    size_t n;
    LG_TRY(build_hash(&c->o, &build));
    forget_other_sites(&c->o, build);
    LG_TRY(lg_path(dir, "%s/reference", c->o.home));
    LG_TRY(lg_path(mark, "%s/reference.build", c->o.home));
    snprintf(line, sizeof line, "%016" PRIx64 "\n", build);
    bool same =
        lg_path_exists(mark) && lg_read_file(mark, 64, &text, &n) == 0 && !strcmp(text, line);
    free(text);
    lg_err_clear();
    if (same) return 0;
    LG_TRY(run_undisturbed(&c->o, dir, NULL));
    if (c->o.data[0]) LG_TRY(make_other(&c->o));
    LG_TRY(lg_publish_file(mark, line, strlen(line)));
    return 0;
}

/* ---- the runs ---- */

static void work(const struct chaos_options *o, int64_t n, int slot)
{
    char path[LG_PATH_BYTES];
    cJSON *j = chaos_run(o, n, slot);
    if (interrupted) _exit(1); /* half a run is no run */
    char *text = cJSON_PrintUnformatted(j);
    LG_ASSERT(text && lg_path(path, "%s/record.%d", o->home, slot) == 0);
    if (lg_publish_file(path, text, strlen(text)) < 0) _exit(1);
    fflush(stdout);
    _exit(0);
}

static double number_of(const cJSON *j, const char *key)
{
    const cJSON *v = cJSON_GetObjectItem(j, key);
    return v ? v->valuedouble : 0;
}

static void collect(struct campaign *c, int slot)
{
    char path[LG_PATH_BYTES], *text, *line = NULL;
    size_t n;
    LG_ASSERT(lg_path(path, "%s/record.%d", c->o.home, slot) == 0);
    if (lg_read_file(path, RECORDS_BYTES_MAX, &text, &n) < 0) {
        lg_err_clear();
        c->failed += !interrupted;
        if (!interrupted) printf("FAIL chaos: a run left no record\n");
        return;
    }
    unlink(path);
    LG_ASSERT(asprintf(&line, "%s\n", text) > 0);
    append_record(c, line);
    cJSON *j = cJSON_Parse(text);
    const char *why = cJSON_GetStringValue(cJSON_GetObjectItem(j, "why"));
    c->kills += (int64_t)number_of(j, "kills");
    c->failed += why && why[0];
    printf("# run %.0f: %.0f kills, %.0f calls failed, %.0f messages in %.1f s%s%s; %" PRId64
           " of %" PRId64 " kills\n",
           number_of(j, "run"), number_of(j, "kills"), number_of(j, "sites_failed"),
           number_of(j, "messages"), number_of(j, "wall_s"), why && why[0] ? " FAILED: " : "",
           why ? why : "", c->kills, c->o.kills);
    fflush(stdout);
    cJSON_Delete(j);
    free(text);
    free(line);
}

static bool wants_more(const struct campaign *c)
{
    int64_t s = (lg_now_ns() - c->began_ns) / LG_S_NS;
    return !interrupted && c->kills < c->o.kills && c->failed < FAILED_MAX &&
           (!c->o.seconds_max || s < c->o.seconds_max);
}

static int busy(const struct campaign *c)
{
    int n = 0;
    for (int k = 0; k < c->o.jobs; k++) n += c->worker[k] > 0;
    return n;
}

static void run_all(struct campaign *c)
{
    c->began_ns = lg_now_ns();
    while (wants_more(c) || busy(c)) {
        for (int k = 0; k < c->o.jobs && wants_more(c); k++) {
            if (c->worker[k]) continue;
            fflush(stdout);
            c->worker[k] = fork();
            LG_ASSERT(c->worker[k] >= 0);
            if (c->worker[k] == 0) work(&c->o, c->next, k);
            c->next++;
        }
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        for (int k = 0; k < c->o.jobs; k++)
            if (pid > 0 && c->worker[k] == pid) {
                c->worker[k] = 0;
                collect(c, k);
            }
    }
}

static int campaign(struct campaign *c)
{
    struct sigaction a = {.sa_handler = on_interrupt};
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    int rc = read_pipeline(&c->o);
    if (rc == 0) rc = read_records(c);
    if (rc == 0) rc = prepare(c);
    if (rc < 0) {
        fprintf(stderr, "chaos: %s\n", lg_err_message());
        return 1;
    }
    run_all(c);
    printf("%s: %" PRId64 " kills in %" PRId64 " runs, %" PRId64 " runs failed%s\n", c->o.name,
           c->kills, c->next, c->failed, interrupted ? ", interrupted" : "");
    return c->failed || interrupted ? 1 : 0;
}

int main(int argc, char **argv)
{
    static struct campaign c = {
        .o = {.kills = 200, .seed = 1, .jobs = 1, .gap_ms = 60, .commit = "unknown"}};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc >= 4 && !strcmp(argv[1], "--report")) {
        int first = argc >= 6 && !strcmp(argv[3], "--notes") ? 5 : 3;
        int rc = chaos_report(argv[2], first == 5 ? argv[4] : NULL, argv + first, argc - first);
        if (rc < 0) fprintf(stderr, "chaos: %s\n", lg_err_message());
        return rc < 0 ? 1 : 0;
    }
    for (int i = 1; i < argc; i += 2)
        if (i + 1 == argc || !take(&c.o, argv[i], argv[i + 1])) return usage();
    if (!c.o.bin[0] || !c.o.pipeline[0] || !c.o.home[0] || c.o.jobs > JOBS_MAX) return usage();
    return campaign(&c);
}
