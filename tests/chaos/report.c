/* docs/reliability.md, from the records of one or more campaigns. Nothing stands in it that does not
 * stand in a record, but for the machine and the date of the report. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RECORDS_BYTES_MAX = 1 << 30, TEXT_BYTES = 4096, LISTED_MAX = 40, NOTES_BYTES_MAX = 1 << 20 };

struct series {
    double *v;
    int n, cap;
};

enum { COMMIT, READY, ADOPT, KINDS };

enum { MODES_MAX = 32 };

struct mode {
    char settings[96];
    int64_t runs, kills;
};

struct totals {
    char pipeline[64], commits[512], seeds[256], failures[TEXT_BYTES];
    int64_t runs, shim_runs, kills, oom_kills, steps, starts, refused, messages, calls,
        calls_missed;
    int64_t diverged, ledger, stuck, other;
    double jobs; /* runs at a time, at most */
    double wall_s, foreign_s;
    int64_t role_kills[LG_ROLE_COUNT], fault[CHAOS_FAULTS];
    int64_t impossible[CHAOS_FAULTS];         /* runs in which it could not be done */
    struct series role[LG_ROLE_COUNT][KINDS]; /* one process killed, nothing else meanwhile */
    struct series group[CHAOS_FAULTS];        /* to the next commit, by fault */
    int64_t sites[CHAOS_PROGRAMS], sites_failed[CHAOS_PROGRAMS];
    bool sanitized;
    struct mode mode[MODES_MAX];
    int modes;
};

static void add(struct series *s, double v)
{
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 256;
        s->v = realloc(s->v, (size_t)s->cap * sizeof *s->v);
        LG_ASSERT(s->v);
    }
    s->v[s->n++] = v;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest value that `share` of all do not exceed. */
static double percentile(struct series *s, double share)
{
    if (!s->n) return NAN;
    qsort(s->v, (size_t)s->n, sizeof *s->v, ascending);
    int rank = (int)ceil(share * s->n);
    return s->v[LG_MAX(rank, 1) - 1];
}

/* ---- reading ---- */

static double number(const cJSON *j, const char *key)
{
    const cJSON *v = cJSON_GetObjectItem(j, key);
    return cJSON_IsNumber(v) ? v->valuedouble : -1;
}

static const char *text(const cJSON *j, const char *key)
{
    const char *s = cJSON_GetStringValue(cJSON_GetObjectItem(j, key));
    return s ? s : "";
}

static bool is_true(const cJSON *j, const char *key)
{
    return cJSON_IsTrue(cJSON_GetObjectItem(j, key));
}

/* Adds a word to a list of different words. */
static void add_word(char *list, size_t bytes, const char *word)
{
    const char *at = strstr(list, word);
    if (at && (at == list || at[-1] == ' ') && (at[strlen(word)] == ',' || !at[strlen(word)]))
        return;
    size_t n = strlen(list);
    if (n + strlen(word) + 3 < bytes) snprintf(list + n, bytes - n, "%s%s", n ? ", " : "", word);
}

static int find_fault(const char *name)
{
    for (int f = 0; f < CHAOS_FAULTS; f++)
        if (!strcmp(name, chaos_fault_name[f])) return f;
    return -1;
}

static void add_event(struct totals *t, const cJSON *e)
{
    int f = find_fault(text(e, "fault")), role = lg_role_find(text(e, "role"));
    double ms[KINDS] = {number(e, "commit_ms"), number(e, "ready_ms"), number(e, "adopt_ms")};
    bool single = f == CHAOS_kill || f == CHAOS_keeper || f == CHAOS_lgsup;
    if (f < 0) return;
    if (is_true(e, "killed") && role >= 0) t->role_kills[role]++;
    if (!is_true(e, "alone")) return;
    if (ms[COMMIT] >= 0) add(&t->group[f], ms[COMMIT]);
    if (!single || role < 0) return;
    for (int k = 0; k < KINDS; k++)
        if (ms[k] >= 0) add(&t->role[role][k], ms[k]);
}

static void add_failure(struct totals *t, const cJSON *j)
{
    const char *why = text(j, "why");
    size_t n = strlen(t->failures);
    if (!*why) return;
    int64_t *kind = !strncmp(why, "diverged", 8) || !strncmp(why, "lost", 4) ? &t->diverged
                    : !strncmp(why, "ledger", 6)                             ? &t->ledger
                    : !strncmp(why, "stuck", 5) || !strncmp(why, "not at its end", 14) ? &t->stuck
                                                                                       : &t->other;
    ++*kind;
    snprintf(t->failures + n, sizeof t->failures - n, "- run %.0f, seed %.0f, commit %s: %.200s\n",
             number(j, "run"), number(j, "seed"), text(j, "commit"), why);
}

static void add_mode(struct totals *t, const cJSON *j)
{
    const char *settings = text(j, "mode");
    int i = 0;
    while (i < t->modes && strcmp(t->mode[i].settings, settings)) i++;
    if (i == MODES_MAX) return;
    if (i == t->modes)
        snprintf(t->mode[t->modes++].settings, sizeof t->mode[i].settings, "%s", settings);
    t->mode[i].runs++;
    t->mode[i].kills += (int64_t)number(j, "kills");
}

static void add_record(struct totals *t, const cJSON *j)
{
    char seed[32];
    const cJSON *e;
    snprintf(t->pipeline, sizeof t->pipeline, "%s", text(j, "pipeline"));
    snprintf(seed, sizeof seed, "%.0f", number(j, "seed"));
    add_word(t->commits, sizeof t->commits, text(j, "commit"));
    add_word(t->seeds, sizeof t->seeds, seed);
    t->runs++;
    t->shim_runs += is_true(j, "shim");
    t->sanitized |= is_true(j, "sanitized");
    t->kills += (int64_t)number(j, "kills");
    t->oom_kills += LG_MAX((int64_t)number(j, "oom_kills"), 0);
    t->steps += (int64_t)number(j, "steps");
    t->starts += (int64_t)number(j, "starts");
    t->refused += (int64_t)number(j, "refused");
    t->messages += (int64_t)number(j, "messages");
    t->calls += (int64_t)number(j, "sites_failed");
    t->calls_missed += (int64_t)number(j, "sites_missed");
    t->jobs = LG_MAX(t->jobs, number(j, "jobs"));
    t->wall_s += number(j, "wall_s");
    t->foreign_s += number(j, "foreign_cores") * number(j, "wall_s");
    for (int f = 0; f < CHAOS_FAULTS; f++)
        t->fault[f] +=
            LG_MAX((int64_t)number(cJSON_GetObjectItem(j, "faults"), chaos_fault_name[f]), 0);
    cJSON_ArrayForEach(e, cJSON_GetObjectItem(j, "impossible"))
    {
        int f = find_fault(cJSON_GetStringValue(e));
        if (f >= 0) t->impossible[f]++;
    }
    cJSON_ArrayForEach(e, cJSON_GetObjectItem(j, "events")) add_event(t, e);
    add_failure(t, j);
    add_mode(t, j);
}

/* The tables of the jobs of a campaign, put together: a place is one place in all of them. */
static void add_sites(struct totals *t, const char *home)
{
    static uint64_t key[CHAOS_SITES_MAX];
    static bool failed[CHAOS_SITES_MAX];
    struct chaos_control *c = malloc(sizeof *c);
    int n = 0;
    LG_ASSERT(c);
    for (int slot = 0; slot < 64; slot++) {
        char path[LG_PATH_BYTES];
        if (lg_path(path, "%s/control.%d", home, slot) < 0) break;
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd < 0 ? 0 : read(fd, c, sizeof *c);
        if (fd >= 0) close(fd);
        for (int i = 0; got == (ssize_t)sizeof *c && i < CHAOS_SITES_MAX; i++) {
            uint64_t k = atomic_load(&c->site[i].key);
            int at = 0;
            if (!k) continue;
            while (at < n && key[at] != k) at++;
            if (at == CHAOS_SITES_MAX) continue;
            if (at == n) failed[n] = false, key[n++] = k;
            failed[at] |= atomic_load(&c->site[i].fails) > 0;
        }
    }
    for (int i = 0; i < n; i++) {
        t->sites[key[i] >> 56 & 7]++;
        t->sites_failed[key[i] >> 56 & 7] += failed[i];
    }
    free(c);
}

static int read_home(struct totals *t, const char *home)
{
    char path[LG_PATH_BYTES], *all, *rest = NULL;
    size_t bytes;
    LG_TRY(lg_path(path, "%s/records.jsonl", home));
    LG_TRY(lg_read_file(path, RECORDS_BYTES_MAX, &all, &bytes));
    for (char *line = strtok_r(all, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        cJSON *j = cJSON_Parse(line);
        if (j) add_record(t, j);
        cJSON_Delete(j);
    }
    free(all);
    add_sites(t, home);
    return 0;
}

/* ---- writing ---- */

static void write_machine(FILE *f)
{
    char line[256], model[256] = "unknown";
    time_t now = time(NULL);
    FILE *info = fopen("/proc/cpuinfo", "re");
    while (info && fgets(line, sizeof line, info))
        if (sscanf(line, "model name : %255[^\n]", model) == 1) break;
    if (info) fclose(info);
    strftime(line, sizeof line, "%Y-%m-%d", gmtime(&now));
    fprintf(f, "Report of %s; %ld cores, %s.\n", line, sysconf(_SC_NPROCESSORS_ONLN), model);
}

static const char head[] = "# Reliability\n\n"
                           "What was done to real runs, and what came of it. Written by `make "
                           "chaos` from the records of its\n"
                           "campaigns; [tests/chaos/README.md](../tests/chaos/README.md) says how "
                           "they work. A run counts as "
                           "good when\nit ends by itself, every checkpoint that it keeps is "
                           "byte-identical to that of a run that "
                           "was left\nalone, the ledger, read by a checker that shares no code "
                           "with its writer, says that every "
                           "sample was\ntrained exactly once and in order, `lgsup verify` agrees, "
                           "and no process is left.\n\n";

static void write_summary(FILE *f, const struct totals *t)
{
    fprintf(f, "\n## %s%s\n\n", t->pipeline,
            t->sanitized ? ", ASan and UBSan in every process" : "");
    fprintf(f, "Commit %s; seed %s.\n\n", t->commits, t->seeds);
    fprintf(f, "| | |\n|---|---|\n");
    fprintf(f,
            "| kills | **%" PRId64 "** |\n| runs | %" PRId64 " (%" PRId64
            " with failing calls, full and "
            "slow disks, set clocks), %" PRId64 " steps, %.1f min of runs |\n",
            t->kills, t->runs, t->shim_runs, t->steps, t->wall_s / 60);
    fprintf(f, "| runs with a divergent byte or a lost checkpoint | **%" PRId64 "** |\n",
            t->diverged);
    fprintf(f, "| runs with a lost or doubled sample | **%" PRId64 "** |\n", t->ledger);
    fprintf(f, "| stuck runs | **%" PRId64 "** |\n", t->stuck);
    fprintf(f,
            "| runs that failed otherwise (parked, refused, processes left) | **%" PRId64 "** |\n",
            t->other);
    fprintf(f,
            "| starts of lgsup | %" PRId64 ", of which a failing call or a full disk ended %" PRId64
            " |\n",
            t->starts, t->refused);
    double foreign = t->foreign_s / LG_MAX(t->wall_s, 1e-9);
    fprintf(f, "| other load meanwhile | %.2f cores%s |\n", foreign,
            foreign > 0.2 ? " (the times below are those of a loaded machine)" : "");
    if (t->jobs >= 1) fprintf(f, "| runs at a time | %.0f |\n", t->jobs);
    if (t->failures[0]) fprintf(f, "\nFailed runs:\n\n%s", t->failures);
}

static void write_modes(FILE *f, const struct totals *t)
{
    fprintf(
        f,
        "\nEvery run is compared with the same undisturbed one, which is as the first row says:\n\n"
        "| settings | runs | kills |\n|---|---|---|\n");
    for (int i = 0; i < t->modes; i++)
        fprintf(f, "| %s | %" PRId64 " | %" PRId64 " |\n",
                t->mode[i].settings[0] ? t->mode[i].settings : "none", t->mode[i].runs,
                t->mode[i].kills);
}

static void write_faults(FILE *f, const struct totals *t)
{
    fprintf(f, "\nKills by role:");
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        fprintf(f, "%s %s %" PRId64, r ? "," : "", lg_role_name((lg_role)r), t->role_kills[r]);
    fprintf(f, "; by the kernel, for want of memory, %" PRId64 ".\n", t->oom_kills);
    fprintf(f, "\n| fault | times | |\n|---|---|---|\n");
    for (int k = 0; k < CHAOS_FAULTS; k++)
        fprintf(f, "| %s | %" PRId64 "%s | %s |\n", chaos_fault_name[k], t->fault[k],
                t->impossible[k] ? " (not possible where it ran)" : "", chaos_fault_doc[k]);
    fprintf(f, "\n%" PRId64 " spoiled messages were sent. ", t->messages);
    int64_t sites = 0, failed = 0;
    for (int p = 0; p < CHAOS_PROGRAMS; p++) sites += t->sites[p], failed += t->sites_failed[p];
    fprintf(f,
            "%" PRId64 " calls were made to fail, at %" PRId64 " of the %" PRId64
            " places in our programs that\nwere seen to call the system:",
            t->calls, failed, sites);
    for (int p = 0; p < CHAOS_PROGRAMS; p++)
        fprintf(f, "%s %s %" PRId64 "/%" PRId64, p ? "," : "", chaos_programs[p],
                t->sites_failed[p], t->sites[p]);
    fprintf(f, ".\n");
}

static void write_cell(FILE *f, struct series *s)
{
    if (s->n)
        fprintf(f, " %.0f / %.0f |", percentile(s, 0.5), percentile(s, 0.99));
    else
        fprintf(f, " |");
}

static void write_times(FILE *f, struct totals *t)
{
    static const char *const aim[LG_ROLE_COUNT] = {
        [LG_ROLE_text] = "50 / 200", [LG_ROLE_vae] = "50 / 200",       [LG_ROLE_ema] = "50 / 200",
        [LG_ROLE_ckpt] = "50 / 200", [LG_ROLE_trainer] = "500 / 1500", [LG_ROLE_lgsup] = "50 / 200",
    };
    fprintf(f,
            "\nOne process killed and nothing else meanwhile, p50 / p99 in ms (looked at once a "
            "ms):\n\n"
            "| role | kills | to the next committed step | to the replacement being ready | aim |\n"
            "|---|---|---|---|---|\n");
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        fprintf(f, "| %s | %d |", lg_role_name((lg_role)r), t->role[r][COMMIT].n);
        write_cell(f, &t->role[r][COMMIT]);
        write_cell(f, &t->role[r][r == LG_ROLE_lgsup ? ADOPT : READY]);
        fprintf(f, " %s |\n", aim[r] ? aim[r] : "");
    }
    fprintf(
        f,
        "\nThe aim is for the next committed step; for lgsup, whose death stops nothing, for the\n"
        "adoption: from the start of the new lgsup until it has taken every process over.\n\n"
        "| fault | to the next committed step, p50 / p99 in ms |\n|---|---|\n");
    for (int k = 0; k < CHAOS_FAULTS; k++) {
        if (k == CHAOS_kill || !t->group[k].n) continue;
        fprintf(f, "| %s |", chaos_fault_name[k]);
        write_cell(f, &t->group[k]);
        fprintf(f, "\n");
    }
}

static void forget(struct totals *t)
{
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        for (int k = 0; k < KINDS; k++) free(t->role[r][k].v);
    for (int f = 0; f < CHAOS_FAULTS; f++) free(t->group[f].v);
    free(t);
}

static int write_notes(FILE *f, const char *path)
{
    char *notes;
    size_t bytes;
    LG_TRY(lg_read_file(path, NOTES_BYTES_MAX, &notes, &bytes));
    fprintf(f, "\n%s", notes);
    free(notes);
    return 0;
}

int chaos_report(const char *path, const char *notes, char *const *homes, int n_homes)
{
    char *all = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&all, &bytes);
    int rc = 0;
    LG_ASSERT(f);
    fputs(head, f);
    write_machine(f);
    for (int i = 0; i < n_homes && rc == 0; i++) {
        struct totals *t = calloc(1, sizeof *t);
        LG_ASSERT(t);
        rc = read_home(t, homes[i]);
        if (rc == 0) {
            write_summary(f, t);
            write_modes(f, t);
            write_faults(f, t);
            write_times(f, t);
        }
        forget(t);
    }
    if (rc == 0 && notes) rc = write_notes(f, notes);
    fclose(f);
    if (rc == 0) rc = lg_publish_file(path, all, bytes);
    free(all);
    return rc;
}
