/* Pictures and histograms of checkpoints; see preview.h. */
#include "supervisor/views/preview.h"
#include "base/clock.h"
#include "config/manifest.h"
#include "config/sample.h"
#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LOOK_MS = 1000,
    ATTEMPTS_MAX = 3,
    RETRY_MS = 2000,
    DRAW_S_MAX = 3600, /* longer is a hang */
    STOP_MS_MAX = 5000,
    NICENESS = 10,
};

static const struct {
    const char *program, *folder, *log; /* RUN/folder/step<N>.ending, RUN/log */
    const char *name, *done, *again;    /* for people */
} made[LG_PREVIEW_KINDS] = {
    [LG_PREVIEW_PICTURES] = {"lg-sample", "samples", "logs/sample.log", "preview", "drawn",
                             "drawn again"},
    [LG_PREVIEW_HISTOGRAMS] = {"lg-histogram", "histograms", "logs/histogram.log", "histograms",
                               "counted", "counted again"},
};

static uint64_t every_of(const lg_run *r, lg_preview_kind kind)
{
    return (uint64_t)(kind == LG_PREVIEW_PICTURES ? r->config->sample_every
                                                  : r->config->tensorboard_histograms_every);
}

int lg_preview_path(const lg_run *r, lg_preview_kind kind, uint64_t step, char ret[LG_PATH_BYTES])
{
    return lg_run_path(r, ret, "%s/step%" PRIu64 ".%s", made[kind].folder, step,
                       kind == LG_PREVIEW_PICTURES ? lg_sample_format(r->config) : "json");
}

/* Step of a checkpoint's folder name, 0: another file. */
static uint64_t step_of(const lg_run *r, const char *name)
{
    size_t n = strlen(r->config->job_name);
    char *end;
    if (strncmp(name, r->config->job_name, n) || strncmp(name + n, "_step", 5)) return 0;
    if (!isdigit((unsigned char)name[n + 5])) return 0;
    uint64_t step = strtoull(name + n + 5, &end, 10);
    return *end ? 0 : step;
}

/* What is older than the checkpoint is another life's. */
static bool is_made(const lg_run *r, const struct lg_preview_job *job)
{
    char path[LG_PATH_BYTES];
    struct stat out, manifest;
    if (lg_preview_path(r, job->kind, job->step, path) < 0) return true;
    if (stat(path, &out) < 0) return false;
    if (lg_path(path, "%s/manifest.json", job->checkpoint) < 0 || stat(path, &manifest) < 0)
        return true;
    if (out.st_mtim.tv_sec != manifest.st_mtim.tv_sec)
        return out.st_mtim.tv_sec > manifest.st_mtim.tv_sec;
    return out.st_mtim.tv_nsec >= manifest.st_mtim.tv_nsec;
}

bool lg_preview_next(const lg_run *r, lg_preview_kind kind, uint64_t past,
                     struct lg_preview_job *ret)
{
    char parent[LG_PATH_BYTES];
    uint64_t least = 0, every = every_of(r, kind);
    struct lg_preview_job job = {.kind = kind};
    DIR *d = every && lg_run_path(r, parent, "checkpoints") == 0 ? opendir(parent) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        job.step = step_of(r, e->d_name);
        if (!job.step || job.step % every || job.step <= past || (least && job.step > least))
            continue;
        if (lg_path(job.checkpoint, "%s/%s", parent, e->d_name) < 0 ||
            !lg_manifest_exists(job.checkpoint) || is_made(r, &job))
            continue;
        least = job.step;
        *ret = job;
    }
    if (d) closedir(d);
    return least != 0;
}

int lg_preview_spawn(const lg_run *r, const struct lg_preview_job *job, struct lg_child *ret)
{
    char program[LG_PATH_BYTES], config[LG_PATH_BYTES], log[LG_PATH_BYTES], out[LG_PATH_BYTES];
    char folder[LG_PATH_BYTES], owner[16];
    LG_TRY(lg_program_path(made[job->kind].program, program));
    LG_TRY(lg_run_path(r, config, "config.toml"));
    LG_TRY(lg_run_path(r, log, "%s", made[job->kind].log));
    LG_TRY(lg_run_path(r, folder, "%s", made[job->kind].folder));
    LG_TRY(lg_mkdirs(folder));
    LG_TRY(lg_preview_path(r, job->kind, job->step, out));
    snprintf(owner, sizeof owner, "%d", (int)getpid());
    bool draws = job->kind == LG_PREVIEW_PICTURES; /* what is drawn stands in the config */
    char *argv[] = {program,
                    (char *)"--from",
                    (char *)job->checkpoint,
                    (char *)"-o",
                    out,
                    (char *)"--owner",
                    owner,
                    draws ? (char *)"--config" : NULL,
                    config,
                    NULL};
    LG_TRY(lg_child_spawn(
        &(struct lg_spawn){.program = program, .argv = argv, .log = log, .pass_fd = -1}, ret));
    setpriority(PRIO_PROCESS, (id_t)ret->pid, NICENESS); /* training comes first; best effort */
    return 0;
}

int lg_preview_result(const lg_run *r, lg_preview_kind kind, int exit_code)
{
    char log[LG_PATH_BYTES], how[64], last[256];
    if (exit_code == 0) return 0;
    LG_TRY(lg_run_path(r, log, "%s", made[kind].log));
    lg_exit_text(exit_code, how, sizeof how);
    last[0] = 0;
    if (exit_code < LG_EXIT_SIGNAL) lg_last_words(log, last, sizeof last);
    return LG_FAIL(LG_ERR_FAILED, "%s: %s%s%s (all of it: %s)", made[kind].program, how,
                   last[0] ? ": " : "", last, log);
}

/* ---- while training goes on ---- */

static void start_next(lg_preview *p, const lg_run *r, int64_t now_ns, struct lg_news *news)
{
    struct lg_preview_job job;
    p->next_ns = now_ns + LOOK_MS * LG_MS_NS;
    if (!lg_preview_next(r, p->kind, p->past, &job)) return;
    if (job.step != p->step) p->attempts = 0;
    p->step = job.step;
    p->deadline_ns = now_ns + DRAW_S_MAX * LG_S_NS;
    if (lg_preview_spawn(r, &job, &p->child) == 0) return;
    lg_news_add(news, LG_WARN, "no %s of step %" PRIu64 ": %s", made[p->kind].name, job.step,
                lg_err_message());
    lg_err_clear();
    p->past = job.step;
}

static void on_end(lg_preview *p, const lg_run *r, int64_t now_ns, struct lg_news *news)
{
    const char *name = made[p->kind].name;
    if (lg_preview_result(r, p->kind, lg_child_reap(&p->child)) == 0) {
        p->past = p->step;
        lg_news_add(news, LG_INFO, "%s of step %" PRIu64 " %s", name, p->step, made[p->kind].done);
        return;
    }
    bool again = ++p->attempts < ATTEMPTS_MAX;
    if (!again) p->past = p->step;
    p->next_ns = now_ns + RETRY_MS * LG_MS_NS;
    lg_news_add(news, LG_WARN, "%s of step %" PRIu64 ": %s; %s", name, p->step, lg_err_message(),
                again ? made[p->kind].again : "given up");
    lg_err_clear();
}

void lg_preview_look(lg_preview *p, const lg_run *r, bool ending, struct lg_news *news)
{
    int64_t now_ns = lg_now_ns();
    if (!every_of(r, p->kind)) return;
    if (ending) {
        lg_preview_stop(p);
    } else if (p->child.pidfd >= 0) {
        if (now_ns > p->deadline_ns) lg_child_signal(&p->child, SIGKILL);
        if (lg_child_wait(&p->child, 0) == 0) on_end(p, r, now_ns, news);
    } else if (now_ns >= p->next_ns) {
        start_next(p, r, now_ns, news);
    }
}

void lg_preview_stop(lg_preview *p)
{
    if (p->child.pidfd < 0) return;
    lg_child_signal(&p->child, SIGKILL);
    lg_child_wait(&p->child, STOP_MS_MAX);
    lg_child_reap(&p->child);
}
