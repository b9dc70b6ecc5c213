/* Previews; see preview.h. */
#include "supervisor/preview.h"
#include "base/clock.h"
#include "config/manifest.h"
#include "supervisor/supervise.h"
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

/* A picture that is older than the checkpoint is another life's. */
static bool is_drawn(const lg_run *r, const char *checkpoint, uint64_t step)
{
    char path[LG_PATH_BYTES];
    struct stat picture, manifest;
    if (lg_run_path(r, path, "samples/step%" PRIu64 ".png", step) < 0) return true;
    if (stat(path, &picture) < 0) return false;
    if (lg_path(path, "%s/manifest.json", checkpoint) < 0 || stat(path, &manifest) < 0) return true;
    if (picture.st_mtim.tv_sec != manifest.st_mtim.tv_sec)
        return picture.st_mtim.tv_sec > manifest.st_mtim.tv_sec;
    return picture.st_mtim.tv_nsec >= manifest.st_mtim.tv_nsec;
}

bool lg_preview_next(const lg_run *r, uint64_t past, uint64_t *ret_step,
                     char ret_checkpoint[LG_PATH_BYTES])
{
    char parent[LG_PATH_BYTES], path[LG_PATH_BYTES];
    uint64_t least = 0, every = (uint64_t)r->config->sample_every;
    DIR *d = every && lg_run_path(r, parent, "checkpoints") == 0 ? opendir(parent) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        uint64_t step = step_of(r, e->d_name);
        if (!step || step % every || step <= past || (least && step > least)) continue;
        if (lg_path(path, "%s/%s", parent, e->d_name) < 0 || !lg_manifest_exists(path)) continue;
        if (is_drawn(r, path, step)) continue;
        least = *ret_step = step;
        memcpy(ret_checkpoint, path, sizeof path);
    }
    if (d) closedir(d);
    return least != 0;
}

int lg_preview_spawn(const lg_run *r, const char *checkpoint, uint64_t step, struct lg_child *ret)
{
    char program[LG_PATH_BYTES], config[LG_PATH_BYTES], log[LG_PATH_BYTES], out[LG_PATH_BYTES];
    char owner[16];
    LG_TRY(lg_program_path("lg-sample", program));
    LG_TRY(lg_run_path(r, config, "config.toml"));
    LG_TRY(lg_run_path(r, log, "logs/sample.log"));
    LG_TRY(lg_run_path(r, out, "samples/step%" PRIu64 ".png", step));
    snprintf(owner, sizeof owner, "%d", (int)getpid());
    char *argv[] = {program,
                    (char *)"--from",
                    (char *)checkpoint,
                    (char *)"--config",
                    config,
                    (char *)"-o",
                    out,
                    (char *)"--owner",
                    owner,
                    NULL};
    LG_TRY(lg_child_spawn(
        &(struct lg_spawn){.program = program, .argv = argv, .log = log, .pass_fd = -1}, ret));
    setpriority(PRIO_PROCESS, (id_t)ret->pid, NICENESS); /* training comes first; best effort */
    return 0;
}

int lg_preview_result(const lg_run *r, int exit_code)
{
    char log[LG_PATH_BYTES], how[64], last[256];
    if (exit_code == 0) return 0;
    LG_TRY(lg_run_path(r, log, "logs/sample.log"));
    lg_exit_text(exit_code, how, sizeof how);
    last[0] = 0;
    if (exit_code < LG_EXIT_SIGNAL) lg_last_words(log, last, sizeof last);
    return LG_FAIL(LG_ERR_FAILED, "lg-sample: %s%s%s (all of it: %s)", how, last[0] ? ": " : "",
                   last, log);
}

/* ---- while training goes on ---- */

static void start_next(lg_supervisor *s, lg_preview *p, int64_t now_ns)
{
    char checkpoint[LG_PATH_BYTES];
    uint64_t step;
    p->next_ns = now_ns + LOOK_MS * LG_MS_NS;
    if (!lg_preview_next(s->run, p->past, &step, checkpoint)) return;
    if (step != p->step) p->attempts = 0;
    p->step = step;
    p->deadline_ns = now_ns + DRAW_S_MAX * LG_S_NS;
    if (lg_preview_spawn(s->run, checkpoint, step, &p->child) == 0) return;
    lg_progress_say(&s->progress, LG_WARN, "no preview of step %" PRIu64 ": %s", step,
                    lg_err_message());
    lg_err_clear();
    p->past = step;
}

static void on_end(lg_supervisor *s, lg_preview *p, int64_t now_ns)
{
    if (lg_preview_result(s->run, lg_child_reap(&p->child)) == 0) {
        p->past = p->step;
        lg_progress_say(&s->progress, LG_INFO, "preview of step %" PRIu64 " drawn", p->step);
        return;
    }
    bool again = ++p->attempts < ATTEMPTS_MAX;
    if (!again) p->past = p->step;
    p->next_ns = now_ns + RETRY_MS * LG_MS_NS;
    lg_progress_say(&s->progress, LG_WARN, "preview of step %" PRIu64 ": %s; %s", p->step,
                    lg_err_message(), again ? "drawn again" : "given up");
    lg_err_clear();
}

void lg_preview_look(lg_supervisor *s)
{
    lg_preview *p = &s->extras.preview;
    int64_t now_ns = lg_now_ns();
    if (!s->run->config->sample_every) return;
    if (s->step >= LG_RUN_STEP_draining) { /* the end is near: nothing but it matters */
        lg_preview_stop(p);
    } else if (p->child.pidfd >= 0) {
        if (now_ns > p->deadline_ns) lg_child_signal(&p->child, SIGKILL);
        if (lg_child_wait(&p->child, 0) == 0) on_end(s, p, now_ns);
    } else if (now_ns >= p->next_ns) {
        start_next(s, p, now_ns);
    }
}

void lg_preview_stop(lg_preview *p)
{
    if (p->child.pidfd < 0) return;
    lg_child_signal(&p->child, SIGKILL);
    lg_child_wait(&p->child, STOP_MS_MAX);
    lg_child_reap(&p->child);
}
