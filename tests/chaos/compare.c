/* Is a run that was killed over and over the same, byte for byte, as one that was left alone? */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FILE_BYTES_MAX = 1 << 30, DEPTH_MAX = 4 };

int chaos_execute(char *const *argv, const char *log, int64_t ms_max)
{
    pid_t pid = fork();
    LG_ASSERT(pid >= 0);
    if (pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fd >= 0) dup2(fd, 1), dup2(fd, 2);
        execv(argv[0], argv);
        _exit(127);
    }
    int status, rc;
    int64_t until = lg_now_ns() + ms_max * LG_MS_NS;
    while ((rc = waitpid(pid, &status, WNOHANG)) == 0 && lg_now_ns() < until) usleep(1000);
    if (rc == 0) {
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int same_file(const char *a, const char *b, char *why, size_t bytes)
{
    char *x = NULL, *y = NULL;
    size_t n = 0, m = 0, i = 0;
    int rc = lg_read_file(a, FILE_BYTES_MAX, &x, &n);
    if (rc == 0) rc = lg_read_file(b, FILE_BYTES_MAX, &y, &m);
    if (rc < 0) {
        snprintf(why, bytes, "%.300s", lg_err_message());
        lg_err_clear();
    } else if (n != m || memcmp(x, y, n) != 0) {
        while (i < n && i < m && x[i] == y[i]) i++;
        snprintf(why, bytes, "diverged: %.250s differs at byte %zu (%zu and %zu bytes)", a, i, n,
                 m);
        rc = -1;
    }
    free(x);
    free(y);
    return rc;
}

static int same_tree(const char *a, const char *b, int depth, char *why, size_t bytes)
{
    DIR *dir = depth < DEPTH_MAX ? opendir(a) : NULL;
    struct dirent *e;
    int rc = 0, here = 0, there = 0;
    if (!dir) {
        snprintf(why, bytes, "cannot read %.250s", a);
        return -1;
    }
    while (rc == 0 && (e = readdir(dir))) {
        char x[LG_PATH_BYTES], y[LG_PATH_BYTES];
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        here++;
        LG_ASSERT(lg_path(x, "%s/%s", a, e->d_name) == 0 && lg_path(y, "%s/%s", b, e->d_name) == 0);
        rc = lstat(x, &st) == 0 && S_ISDIR(st.st_mode) ? same_tree(x, y, depth + 1, why, bytes)
                                                       : same_file(x, y, why, bytes);
    }
    closedir(dir);
    dir = opendir(b);
    while (dir && (e = readdir(dir))) there += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    if (dir) closedir(dir);
    if (rc == 0 && here != there) {
        snprintf(why, bytes, "diverged: %.250s has %d entries, the undisturbed run %d", a, here,
                 there);
        rc = -1;
    }
    return rc;
}

int chaos_same_tree(const char *a, const char *b, char *why, size_t bytes)
{
    return same_tree(a, b, 0, why, bytes);
}

/* `lgsup stop` writes a checkpoint wherever the run is; the undisturbed run has none of that step, and
 * what followed from it is compared. */
static bool is_of_a_stop(const struct chaos_run *r, const char *name)
{
    const char *at = strstr(name, "_step");
    return r->stops > 0 && at && r->o->every > 0 && strtoll(at + 5, NULL, 10) % r->o->every != 0 &&
           strtoll(at + 5, NULL, 10) != r->o->steps;
}

static int compare_checkpoints(const struct chaos_run *r, const char *reference, char *why,
                               size_t bytes)
{
    const struct chaos_options *o = r->o;
    const char *run = r->dir;
    char a[LG_PATH_BYTES], b[LG_PATH_BYTES], last[128];
    bool found = false;
    int rc = 0;
    snprintf(last, sizeof last, "%s_step%" PRId64, o->name, o->steps);
    LG_ASSERT(lg_path(a, "%s/checkpoints", run) == 0);
    DIR *dir = opendir(a);
    struct dirent *e;
    while (dir && rc == 0 && (e = readdir(dir))) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (is_of_a_stop(r, e->d_name)) continue;
        if (e->d_name[0] == '.') {
            snprintf(why, bytes, "half-written: %s is left in checkpoints", e->d_name);
            rc = -1;
            break;
        }
        found = found || !strcmp(e->d_name, last);
        LG_ASSERT(lg_path(a, "%s/checkpoints/%s", run, e->d_name) == 0);
        LG_ASSERT(lg_path(b, "%s/checkpoints/%s", reference, e->d_name) == 0);
        /* A checkpoint is left out while the one before it is still being written, on a quick machine also
         * by the run that was left alone; never the last one. */
        if (lg_path_exists(b) || !strcmp(e->d_name, last)) rc = same_tree(a, b, 0, why, bytes);
    }
    if (dir) closedir(dir);
    if (rc == 0 && !found) {
        snprintf(why, bytes, "lost: there is no checkpoint %s", last);
        rc = -1;
    }
    return rc;
}

static int execute_check(char *const *argv, const char *what, const char *run, char *why,
                         size_t bytes)
{
    char log[LG_PATH_BYTES], *text = NULL;
    size_t n;
    LG_ASSERT(lg_path(log, "%s/chaos-%s.log", run, what) == 0);
    int code = chaos_execute(argv, log, CHAOS_CHILD_MS_MAX);
    if (code == 0) return 0;
    if (lg_read_file(log, 1 << 20, &text, &n) < 0) lg_err_clear();
    snprintf(why, bytes, "%s: exit %d: %.250s", what, code, text ? text : "");
    why[strcspn(why, "\n")] = 0;
    free(text);
    return -1;
}

static int check_ledger(const struct chaos_options *o, const char *run, char *why, size_t bytes)
{
    char program[LG_PATH_BYTES], ledger[LG_PATH_BYTES], metrics[LG_PATH_BYTES];
    char steps[32], batch[32], seed[32], ranks[32], micro[32];
    LG_ASSERT(lg_path(program, "%s/ledger_check", o->tools) == 0 &&
              lg_path(ledger, "%s/ledger", run) == 0 &&
              lg_path(metrics, "%s/metrics.jsonl", run) == 0);
    snprintf(steps, sizeof steps, "%" PRId64, o->steps);
    snprintf(batch, sizeof batch, "%" PRId64, o->batch);
    snprintf(seed, sizeof seed, "%" PRId64, o->data_seed);
    snprintf(ranks, sizeof ranks, "%" PRId64, o->ranks);
    snprintf(micro, sizeof micro, "%" PRId64, o->micro);
    char *argv[] = {program,
                    (char *)"--steps",
                    steps,
                    (char *)"--batch",
                    batch,
                    (char *)"--seed",
                    seed,
                    (char *)"--metrics",
                    metrics,
                    ledger,
                    (char *)"--tar",
                    (char *)o->tar,
                    (char *)"--ranks",
                    ranks,
                    (char *)"--micro",
                    micro,
                    (char *)"--buckets",
                    (char *)o->buckets,
                    NULL};
    if (!o->tar) argv[10] = NULL;
    if (!o->buckets[0]) argv[16] = NULL;
    return execute_check(argv, "ledger", run, why, bytes);
}

int chaos_compare(const struct chaos_run *r, const char *reference, char *why, size_t bytes)
{
    char a[LG_PATH_BYTES], b[LG_PATH_BYTES], lgsup[LG_PATH_BYTES];
    LG_ASSERT(lg_path(a, "%s/ledger", r->dir) == 0 && lg_path(b, "%s/ledger", reference) == 0);
    LG_ASSERT(lg_path(lgsup, "%s/lgsup", r->o->bin) == 0);
    char *verify[] = {lgsup, (char *)"verify", (char *)r->dir, NULL};
    if (compare_checkpoints(r, reference, why, bytes) < 0) return -1;
    if (check_ledger(r->o, r->dir, why, bytes) < 0) return -1;
    if (same_file(a, b, why, bytes) < 0) return -1;
    return execute_check(verify, "verify", r->dir, why, bytes);
}
