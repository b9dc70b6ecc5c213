/* The status of a run; see status.h. */
#include "supervisor/views/status.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/json_tree.h"
#include "base/printable.h"
#include "config/manifest.h"
#include "supervisor/run/programs.h"
#include "supervisor/run/waiting.h"
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <unistd.h>

static const char WAITING[] = "waiting"; /* of a run that has not begun here */
enum { STATUS_BYTES_MAX = 1 << 20, STATUS_TOKENS_MAX = 1 << 17 };

uint64_t lg_status_step(lg_board *b)
{
    lg_mark m = lg_board_global_commit(b);
    return m == LG_MARK_NONE ? b->s->start_step : lg_mark_state(m);
}

bool lg_status_row_alive(const struct lg_board_row *row)
{
    int pid = (int)atomic_load(&row->pid);
    int pidfd = pid > 0 ? pidfd_open(pid, 0) : -1;
    if (pidfd < 0) return false;
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    bool alive = lg_process_start_time(pid) == atomic_load(&row->start_time) && poll(&p, 1, 0) <= 0;
    close(pidfd);
    return alive;
}

static bool is_final(uint32_t state)
{
    return state >= LG_RUN_DONE;
}

static const char *instance_state(const struct lg_board_row *row, bool alive, bool over)
{
    static const char *const phases[] = {"setup", "waiting", "working", "done"};
    lg_life life = (lg_life)(atomic_load(&row->life) & 0xff);
    uint32_t phase = atomic_load(&row->phase);
    lg_incarnation who = (lg_incarnation)(atomic_load(&row->life) >> 8);
    if (over && !alive) return "gone";
    if (alive && atomic_load(&row->standby) == who) return "standby";
    if (alive && atomic_load(&row->leave) == who) return "leaving";
    if (alive) return phase < LG_ARRAY_LEN(phases) ? phases[phase] : "?";
    return life == LG_LIFE_STARTING ? "starting" : "dead";
}

static int64_t beat_age_ns(const struct lg_board_row *row, bool alive)
{
    int64_t beat_ns = atomic_load(&row->heartbeat_ns);
    return alive && beat_ns ? LG_MAX(lg_now_ns() - beat_ns, 0) : -1;
}

static void read_row(lg_board *b, lg_role role, int index, bool over, struct lg_status *ret)
{
    const struct lg_board_row *row = lg_board_row(b, role, index);
    lg_life life;
    lg_board_life(b, role, index, &life);
    if (life == LG_LIFE_NONE) return;
    bool alive = lg_status_row_alive(row);
    struct lg_status_instance *i = &ret->instance[ret->n_instances++];
    *i = (struct lg_status_instance){.role = role,
                                     .index = index,
                                     .pid = alive ? (int)atomic_load(&row->pid) : 0,
                                     .state = instance_state(row, alive, over),
                                     .restarts = atomic_load(&row->restarts),
                                     .samples = atomic_load(&row->samples),
                                     .beat_age_ns = beat_age_ns(row, alive)};
    if (role == LG_ROLE_lgsup && alive) i->state = "working";
}

/* A board that says "running" while neither lgsup nor a stage lives tells of a crash. */
static const char *run_state(lg_board *b, const struct lg_status *st)
{
    uint32_t state = atomic_load(&b->s->run_state);
    bool alive = false;
    for (int i = 0; i < st->n_instances; i++)
        alive |= st->instance[i].pid != 0 && st->instance[i].role != LG_ROLE_keeper;
    return lg_run_state_name(is_final(state) || alive ? (lg_run_state)state : LG_RUN_FAILED);
}

/* Programs that `lgsup swap` has put in force. A damaged file is lgsup's to complain about. */
static void read_programs(const char *dir, lg_board *b, struct lg_status *ret)
{
    lg_programs p;
    if (lg_programs_load(&p, dir, b->s->preamble.run_id) < 0) lg_err_clear();
    for (int i = 0; i < ret->n_instances; i++) {
        const char *path = lg_programs_get(&p, ret->instance[i].role, ret->instance[i].index);
        snprintf(ret->instance[i].program, sizeof ret->instance[i].program, "%s", path ? path : "");
    }
    lg_programs_free(&p);
}

static void read_board(const char *dir, lg_board *b, struct lg_status *ret)
{
    bool over = is_final(atomic_load(&b->s->run_state));
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        for (int k = 0; k < LG_INSTANCES_MAX; k++) read_row(b, (lg_role)r, k, over, ret);
        if (r < LG_ROLE_keeper) ret->wanted[r] = atomic_load(&b->s->wanted[r]);
    }
    read_programs(dir, b, ret);
    ret->memory_kept = atomic_load(&b->s->run_state) == LG_RUN_PARKED &&
                       atomic_load(&b->s->memory_kept) &&
                       lg_status_row_alive(lg_board_row(b, LG_ROLE_keeper, 0));
    ret->state = run_state(b, ret);
    ret->step = lg_status_step(b);
    ret->max_steps = b->s->max_steps;
    ret->loss = atomic_load(&b->s->metrics.loss);
    ret->loss_vb = atomic_load(&b->s->metrics.loss_vb);
    ret->has_vb = atomic_load(&b->s->metrics.has_vb);
    ret->grad_norm = atomic_load(&b->s->metrics.grad_norm);
    ret->lr = atomic_load(&b->s->metrics.lr);
    ret->samples_per_s = atomic_load(&b->s->metrics.samples_per_s);
    ret->data_wait_s = atomic_load(&b->s->metrics.data_wait_s);
    ret->voids = atomic_load(&b->s->metrics.voids);
    ret->skipped = atomic_load(&b->s->metrics.skipped);
    snprintf(ret->cause, sizeof ret->cause, "%.*s", (int)sizeof b->s->cause - 1, b->s->cause);
}

/* ---- JSON ---- */

cJSON *lg_status_json(const struct lg_status *st)
{
    cJSON *j = cJSON_CreateObject();
    cJSON_AddNumberToObject(j, "format", LG_STATUS_FORMAT);
    lg_json_add_text(j, "job", st->job);
    cJSON_AddStringToObject(j, "state", st->state);
    cJSON_AddNumberToObject(j, "step", (double)st->step);
    cJSON_AddNumberToObject(j, "max_steps", (double)st->max_steps);
    cJSON_AddNumberToObject(j, "loss", st->loss);
    cJSON_AddNumberToObject(j, "loss_mse", st->has_vb ? st->loss - st->loss_vb : (double)NAN);
    cJSON_AddNumberToObject(j, "loss_vb", st->has_vb ? st->loss_vb : (double)NAN);
    cJSON_AddNumberToObject(j, "grad_norm", st->grad_norm);
    cJSON_AddNumberToObject(j, "lr", st->lr);
    cJSON_AddNumberToObject(j, "samples_per_s", st->samples_per_s);
    cJSON_AddNumberToObject(j, "data_wait_s", st->data_wait_s);
    cJSON_AddNumberToObject(j, "voids", (double)st->voids);
    cJSON_AddNumberToObject(j, "skipped_steps", (double)st->skipped);
    lg_json_add_text(j, "cause", st->cause);
    cJSON_AddBoolToObject(j, "memory_kept", st->memory_kept);
    lg_json_add_text(j, "checkpoint", st->checkpoint);
    cJSON *wanted = cJSON_AddObjectToObject(j, "wanted");
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        if (st->wanted[r]) cJSON_AddNumberToObject(wanted, lg_role_name((lg_role)r), st->wanted[r]);
    cJSON *instances = cJSON_AddArrayToObject(j, "instances");
    for (int i = 0; i < st->n_instances; i++) {
        const struct lg_status_instance *p = &st->instance[i];
        cJSON *o = cJSON_CreateObject();
        cJSON_AddStringToObject(o, "role", lg_role_name(p->role));
        cJSON_AddNumberToObject(o, "index", p->index);
        cJSON_AddNumberToObject(o, "pid", p->pid);
        cJSON_AddStringToObject(o, "state", p->state);
        cJSON_AddNumberToObject(o, "restarts", p->restarts);
        cJSON_AddNumberToObject(o, "samples", (double)p->samples);
        if (p->beat_age_ns >= 0)
            cJSON_AddNumberToObject(o, "heartbeat_age_s", (double)p->beat_age_ns / LG_S_NS);
        else
            cJSON_AddNullToObject(o, "heartbeat_age_s");
        lg_json_add_text(o, "program", p->program);
        cJSON_AddItemToArray(instances, o);
    }
    return j;
}

static uint64_t number(const cJSON *j, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    return cJSON_IsNumber(v) && v->valuedouble > 0 ? (uint64_t)v->valuedouble : 0;
}

static void text(const cJSON *j, const char *key, char *ret, size_t bytes)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    snprintf(ret, bytes, "%s", cJSON_IsString(v) ? v->valuestring : "");
}

/* The last status that was saved; a state that was not final then is "failed" now. */
static int read_saved(const char *dir, struct lg_status *ret)
{
    char path[LG_PATH_BYTES], state[32], *data;
    size_t bytes;
    LG_TRY(lg_path(path, "%s/status.json", dir));
    LG_TRY(lg_read_file(path, STATUS_BYTES_MAX, &data, &bytes));
    cJSON *j = NULL;
    int rc = lg_json_tree(path, data, bytes, STATUS_TOKENS_MAX, &j);
    free(data);
    LG_TRY(rc);
    ret->step = number(j, "step");
    ret->max_steps = number(j, "max_steps");
    text(j, "state", state, sizeof state);
    text(j, "cause", ret->cause, sizeof ret->cause);
    ret->state = lg_run_state_name(LG_RUN_FAILED);
    for (int s = LG_RUN_DONE; s <= LG_RUN_FAILED; s++)
        if (!strcmp(state, lg_run_state_name((lg_run_state)s)))
            ret->state = lg_run_state_name((lg_run_state)s);
    cJSON_Delete(j);
    return 0;
}

/* ---- reading and saving ---- */

static void read_job(const char *dir, struct lg_status *ret)
{
    lg_run *run = malloc(sizeof *run);
    lg_manifest *m = malloc(sizeof *m);
    char checkpoints[LG_PATH_BYTES];
    if (run && m) {
        lg_run_init(run, dir);
        if (lg_run_load(run) == 0) {
            snprintf(ret->job, sizeof ret->job, "%s", run->config->job_name);
            if (lg_run_path(run, checkpoints, "checkpoints") == 0 &&
                lg_manifest_newest(checkpoints, ret->job, ret->checkpoint, m) < 0)
                ret->checkpoint[0] = 0;
        }
        lg_run_close(run);
        lg_err_clear();
    }
    free(m);
    free(run);
}

/* The board cannot be opened, as `why` says: is what was saved last all that can be known? */
static void read_why(const char *board, const char *why, struct lg_status *ret)
{
    struct lg_board_preamble p;
    int code;
    lg_board_standing standing = lg_board_look(board, &p, &code);
    const bool fits = standing == LG_BOARD_FITS && p.ended != LG_BOARD_ENDED;
    if (standing == LG_BOARD_OTHER_BUILD || standing == LG_BOARD_UNREADABLE || fits)
        snprintf(ret->cause, sizeof ret->cause, "%.400s; its processes may live",
                 fits ? why : lg_err_message());
    lg_err_clear();
}

/* What an earlier run has left in the directory is not this one's. */
static bool read_waiting(const char *dir, struct lg_status *ret)
{
    struct lg_waiting w;
    if (!lg_waiting_read(dir, &w)) return false;
    snprintf(ret->job, sizeof ret->job, "%s", w.job);
    snprintf(ret->cause, sizeof ret->cause, "%s", w.what);
    ret->state = WAITING;
    ret->instance[ret->n_instances++] = (struct lg_status_instance){
        .role = LG_ROLE_lgsup, .pid = w.pid, .state = WAITING, .beat_age_ns = -1};
    return true;
}

int lg_status_read(const char *dir, struct lg_status *ret)
{
    char path[LG_PATH_BYTES], why[512];
    lg_board *b = NULL;
    memset(ret, 0, sizeof *ret);
    if (read_waiting(dir, ret)) return 0;
    LG_TRY(lg_run_is_there(dir));
    read_job(dir, ret);
    LG_TRY(lg_path(path, "%s/board", dir));
    if (lg_board_open(path, 0, &b) == 0) {
        read_board(dir, b, ret);
        bool over = is_final(atomic_load(&b->s->run_state));
        lg_board_close(&b);
        if (!over && !ret->cause[0] && !strcmp(ret->state, lg_run_state_name(LG_RUN_FAILED)) &&
            lg_board_is_held(path))
            snprintf(ret->cause, sizeof ret->cause,
                     "processes of the run live where they cannot be seen from here (in another "
                     "container?): ask there");
        return 0;
    }
    snprintf(why, sizeof why, "%s", lg_err_message());
    lg_err_clear();
    int rc = read_saved(dir, ret);
    if (rc == LG_ERR_NOTFOUND)
        return LG_FAIL(rc,
                       "the run in %s has no status yet (no %s/status.json): it is only just "
                       "starting, or its start has failed",
                       dir, dir);
    LG_TRY(rc);
    read_why(path, why, ret);
    return 0;
}

void lg_status_save(const char *dir, lg_board *b)
{
    char path[LG_PATH_BYTES];
    struct lg_status *st = calloc(1, sizeof *st);
    if (!st) return;
    read_job(dir, st);
    read_board(dir, b, st);
    cJSON *j = lg_status_json(st);
    char *json = cJSON_Print(j);
    if (json && lg_path(path, "%s/status.json", dir) == 0)
        lg_publish_file(path, json, strlen(json));
    lg_err_clear();
    free(json);
    cJSON_Delete(j);
    free(st);
}

const char *lg_status_name(const struct lg_status_instance *p, char ret[LG_STATUS_NAME_BYTES])
{
    snprintf(ret, LG_STATUS_NAME_BYTES, "%s.%d", lg_role_name(p->role), p->index);
    return ret;
}

void lg_loss_text(double loss, const double *vb, char ret[LG_LOSS_TEXT_BYTES])
{
    int n = snprintf(ret, LG_LOSS_TEXT_BYTES, "%.4f", loss);
    if (vb)
        snprintf(ret + n, (size_t)(LG_LOSS_TEXT_BYTES - n), " (mse %.4f, vb %.4f)", loss - *vb,
                 *vb);
}

int lg_status_columns(const struct lg_status *st, int least)
{
    char name[LG_STATUS_NAME_BYTES];
    for (int i = 0; i < st->n_instances; i++)
        least = LG_MAX(least, (int)strlen(lg_status_name(&st->instance[i], name)));
    return least;
}

void lg_status_print(const struct lg_status *st, FILE *to)
{
    lg_print(to, "job         %s\nstate       %s\n", st->job, st->state);
    if (st->state != WAITING)
        fprintf(to, "step        %" PRIu64 " of %" PRIu64 "\n", st->step, st->max_steps);
    char parts[LG_LOSS_TEXT_BYTES];
    lg_loss_text(st->loss, st->has_vb ? &st->loss_vb : NULL, parts);
    if (st->samples_per_s > 0)
        fprintf(to, "loss        %s\nsamples/s   %.1f\n", parts, st->samples_per_s);
    if (st->voids) fprintf(to, "void        %" PRIu64 " samples\n", st->voids);
    if (st->skipped) fprintf(to, "skipped     %" PRIu64 " steps\n", st->skipped);
    if (st->cause[0]) {
        fputs("cause       ", to);
        lg_print_text(to, st->cause, strlen(st->cause), LG_NEWLINES_INDENTED);
        putc('\n', to);
    }
    if (st->memory_kept)
        fprintf(to,
                "memory      kept: `lgsup start` goes on from step %" PRIu64
                ", `lgsup stop` lets it "
                "go\n",
                st->step);
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        int there = 0;
        for (int i = 0; i < st->n_instances; i++)
            there += st->instance[i].role == (lg_role)r && st->instance[i].pid != 0;
        if (there && st->wanted[r] && there != (int)st->wanted[r])
            fprintf(to, "wanted      %u %s, %d there\n", st->wanted[r], lg_role_name((lg_role)r),
                    there);
    }
    lg_print(to, "checkpoint  %s\n", st->checkpoint[0] ? st->checkpoint : "none yet");
    const int columns = lg_status_columns(st, 12);
    if (st->n_instances)
        fprintf(to, "\n%-*s %8s  %-9s %8s\n", columns, "process", "pid", "state", "restarts");
    for (int i = 0; i < st->n_instances; i++) {
        const struct lg_status_instance *p = &st->instance[i];
        char name[LG_STATUS_NAME_BYTES], pid[16] = "-";
        if (p->pid) snprintf(pid, sizeof pid, "%d", p->pid);
        lg_print(to, "%-*s %8s  %-9s %8u%s%s\n", columns, lg_status_name(p, name), pid, p->state,
                 p->restarts, *p->program ? "  " : "", p->program);
    }
}
