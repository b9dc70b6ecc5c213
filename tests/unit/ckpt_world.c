/* See ckpt_world.h. */
#include "tests/unit/ckpt_world.h"
#include "config/manifest.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/roles.h"
#include "supervisor/core/keep.h"
#include "tests/unit/scratch.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { W, M, V, EMA };
enum { READY_MS_MAX = 60000 };

/* Element i of a state's array `kind`; small whole numbers, so every fp32 is exact. */
static float value(int kind, uint64_t state, size_t i)
{
    return (float)((state * 7919 + (uint64_t)kind * 1009 + i * 31) % 4093);
}

static void make_run(struct ckpt_world *w, const struct ckpt_world_spec *spec)
{
    char cwd[1024], toml[4096], line[sizeof w->f.dir + 1], path[LG_PATH_BYTES];
    lg_config *config = NULL;
    LG_ASSERT(getcwd(cwd, sizeof cwd));
    scratch_write("data/a.txt", "a caption");
    snprintf(toml, sizeof toml,
             "device = \"%s\"\n[job]\nname = \"world\"\ndir = \"run\"\nseed = 5\n"
             "[data]\npath = \"data\"\n"
             "[text]\nmodel = \"%s/examples/emoji/text_encoder\"\n"
             "[vae]\nmodel = \"%s/examples/emoji/vae\"\n"
             "[model]\nkind = \"pixart\"\nhidden = %d\ndepth = %d\nheads = 2\npatch = 4\n"
             "[checkpoint]\nevery = %d\nkeep = %d\n"
             "[trainer]\nranks = %d\nmax_steps = %" PRIu64
             "\nglobal_batch_size = 8\nmicro_batch_size = 4\n%s",
             spec->device, cwd, cwd, spec->hidden ? spec->hidden : 16,
             spec->depth ? spec->depth : 1, CKPT_EVERY, CKPT_KEEP, spec->ranks,
             spec->steps ? spec->steps : CKPT_STEPS, spec->more ? spec->more : "");
    LG_ASSERT(lg_config_load(scratch_write("pipeline.toml", toml), NULL, 0, &config) == 0);
    lg_run_init(&w->run, scratch_path("run"));
    LG_ASSERT(lg_run_create(&w->run) == 0 && lg_run_decide(&w->run, config) == 0);
    LG_ASSERT(lg_run_save(&w->run) == 0);
    snprintf(line, sizeof line, "%s", w->f.dir);
    LG_ASSERT(lg_path(path, "%s/runtime", w->run.dir) == 0);
    LG_ASSERT(lg_publish_file(path, line, strlen(line)) == 0);
}

static void attach(struct ckpt_world *w, lg_stage *st, lg_role role)
{
    *st = (lg_stage){.role = role, .config = w->run.config, .plan = w->run.plan, .board = w->board};
    st->row = lg_board_row(w->board, role, 0);
    snprintf(st->run_dir, sizeof st->run_dir, "%s", w->run.dir);
    snprintf(st->runtime_dir, sizeof st->runtime_dir, "%s", w->f.dir);
    snprintf(st->keeper, sizeof st->keeper, "%s", w->f.keeper);
}

static void detach(lg_stage *st)
{
    for (int i = 0; i < st->n_regions; i++) lg_region_close(&st->region[i]);
    for (int i = 0; i < st->n_devices; i++) lg_device_close(&st->device[i]);
}

void ckpt_world_open(struct ckpt_world *w, const struct ckpt_world_spec *spec)
{
    char path[LG_PATH_BYTES];
    lg_device *device[LG_INSTANCES_MAX];
    memset(w, 0, sizeof *w);
    scratch_make();
    shm_fixture_open(&w->f, spec->ranks);
    shm_fixture_start_keeper(&w->f);
    make_run(w, spec);
    struct lg_board_spec board = {.plan = &w->run.plan,
                                  .max_steps = spec->steps ? spec->steps : CKPT_STEPS,
                                  .checkpoint_every = CKPT_EVERY};
    LG_ASSERT(lg_path(path, "%s/board", w->run.dir) == 0);
    LG_ASSERT(lg_board_create(path, &board, &w->board) == 0);
    attach(w, &w->player, LG_ROLE_trainer);
    LG_ASSERT(lg_state_devices(&w->player, device) == 0);
    LG_ASSERT(lg_trainer_state_open(&w->player, device, &w->trainer) == 0);
    for (int r = 0; r < w->trainer->ranks; r++)
        LG_ASSERT(lg_trainer_moments_open(&w->player, device[r], w->trainer, r) == 0);
    for (int r = 0; r < w->trainer->shards; r++)
        for (int side = 0; side < 2; side++)
            LG_ASSERT(lg_ema_region(&w->player, w->trainer, device[r], r, side, &w->ema[r][side]) ==
                      0);
}

void ckpt_world_close(struct ckpt_world *w)
{
    lg_trainer_state_close(&w->trainer);
    detach(&w->player);
    lg_board_close(&w->board);
    lg_run_close(&w->run);
    shm_fixture_close(&w->f);
    scratch_remove();
    lg_err_clear();
}

/* What of the unit lies in the chunk. */
static void make_moments(struct ckpt_world *w, struct lg_piece p, uint64_t state,
                         const struct lg_chunk *c)
{
    p = lg_piece_within(p, c->first, c->count);
    for (size_t i = 0; i < p.count; i++) {
        c->m[p.at - c->first + i] = value(M, state, p.first + i);
        c->v[p.at - c->first + i] = value(V, state, p.first + i);
    }
}

static void make_state(struct ckpt_world *w, int rank, uint64_t state)
{
    const int chunks = lg_moments_chunks(lg_trainer_shard(w->trainer, rank));
    struct lg_state_view view = lg_trainer_state_view(w->trainer, rank, state);
    struct lg_stamp *moments = w->trainer->moments[rank]->front;
    lg_stamp_clear(view.stamp);
    *view.scalars =
        (struct lg_state_scalars){.state = state, .optimizer_steps = state + 3, .skipped = 2};
    snprintf(view.device, LG_STATE_DEVICE_BYTES, "of state %" PRIu64, state);
    for (int u = 0; u < w->trainer->params.n_units; u++) {
        struct lg_piece p = lg_trainer_piece(w->trainer, rank, u);
        for (size_t i = 0; i < p.count; i++) view.w[p.at + i] = value(W, state, p.first + i);
    }
    for (int k = 0; k < chunks; k++) {
        struct lg_chunk c = lg_trainer_chunk(w->trainer, rank, k, state + 3);
        for (int u = 0; u < w->trainer->params.n_units; u++)
            make_moments(w, lg_trainer_piece(w->trainer, rank, u), state, &c);
        if (k < chunks - 1 && lg_stamp_parts(moments, state - 1) == k)
            lg_stamp_set_parts(moments, state - 1, k + 1);
    }
    lg_stamp_set(moments, state);
    lg_stamp_set(view.stamp, state);
}

static bool play_rank(struct ckpt_world *w, int rank, uint64_t until)
{
    struct lg_action a = lg_trainer_next(w->board, rank);
    switch (a.kind) {
    case LG_DO_INIT:
        make_state(w, rank, a.step);
        lg_trainer_mark_init(w->board, rank);
        return true;
    case LG_DO_DECIDE:
        if (a.step >= until) return false;
        lg_commit_decide(w->board, a.step);
        return true;
    case LG_DO_FORWARD:
        lg_trainer_mark_grads(w->board, rank, a.step, (struct lg_loss_sum){.all = 1});
        return true;
    case LG_DO_REDUCE:
        lg_trainer_mark_partial(w->board, rank, a.step, &(struct lg_exact_sum){0});
        return true;
    case LG_DO_UPDATE:
        make_state(w, rank, a.step + 1);
        lg_trainer_mark_commit(w->board, rank, a.step);
        return true;
    default:
        return false;
    }
}

static bool play_ema(struct ckpt_world *w)
{
    struct lg_action a = lg_ema_next(w->board);
    if (a.kind != LG_DO_INIT && a.kind != LG_DO_ADVANCE) return false;
    for (int r = 0; r < w->trainer->shards; r++) {
        float *to = w->ema[r][a.step & 1]->payload;
        lg_stamp_clear(w->ema[r][a.step & 1]->front);
        for (int u = 0; u < w->trainer->params.n_units; u++) {
            struct lg_piece p = lg_trainer_piece(w->trainer, r, u);
            for (size_t i = 0; i < p.count; i++) to[p.at + i] = value(EMA, a.step, p.first + i);
        }
        lg_stamp_set(w->ema[r][a.step & 1]->front, a.step);
    }
    lg_ema_mark(w->board, a.step);
    return true;
}

void ckpt_world_play(struct ckpt_world *w, uint64_t until)
{
    for (bool more = true; more;) {
        more = play_ema(w);
        for (int r = 0; r < w->trainer->ranks; r++) more |= play_rank(w, r, until);
    }
}

static uint64_t state_of(lg_mark m)
{
    return m == LG_MARK_NONE ? 0 : lg_mark_state(m);
}

uint64_t ckpt_world_staged(const struct ckpt_world *w)
{
    return state_of(atomic_load(&lg_board_row(w->board, LG_ROLE_ckpt, 0)->staged));
}

uint64_t ckpt_world_published(const struct ckpt_world *w)
{
    return state_of(atomic_load(&lg_board_row(w->board, LG_ROLE_ckpt, 0)->published));
}

static void path_of(const struct ckpt_world *w, uint64_t state, char ret[LG_PATH_BYTES])
{
    LG_ASSERT(lg_path(ret, "%s/checkpoints/world_step%" PRIu64, w->run.dir, state) == 0);
}

bool ckpt_world_has(const struct ckpt_world *w, uint64_t state)
{
    char dir[LG_PATH_BYTES];
    path_of(w, state, dir);
    return lg_manifest_exists(dir);
}

/* What lies between the parameters is in no file. */
static bool are(const float *got, const lg_params *t, int kind, uint64_t state)
{
    for (const struct lg_param *p = t->p; p < t->p + t->n; p++)
        for (size_t i = p->offset; i < p->offset + p->count; i++)
            if (!(got[i] == value(kind, state, i))) return false;
    return true;
}

static const char *wrong_numbers(const struct ckpt_world *w, const char *dir, uint64_t state)
{
    const lg_params *p = &w->trainer->params;
    size_t n = p->count;
    char model[LG_PATH_BYTES], ema[LG_PATH_BYTES];
    const char *wrong = NULL;
    float *v = calloc(5 * n, sizeof *v);
    LG_ASSERT(v && lg_path(model, "%s/model", dir) == 0 && lg_path(ema, "%s/ema", dir) == 0);
    if (lg_checkpoint_read_optimizer(dir, p, 0, n, v, v + n, v + 2 * n) < 0 ||
        lg_denoiser_load(&w->trainer->net, model, v + 3 * n) < 0 ||
        lg_denoiser_load(&w->trainer->net, ema, v + 4 * n) < 0)
        wrong = lg_err_message();
    else if (!are(v, p, W, state) || !are(v + 3 * n, p, W, state))
        wrong = "other weights";
    else if (!are(v + n, p, M, state) || !are(v + 2 * n, p, V, state))
        wrong = "other moments";
    else if (!are(v + 4 * n, p, EMA, state))
        wrong = "another EMA";
    free(v);
    return wrong;
}

const char *ckpt_world_wrong(const struct ckpt_world *w, uint64_t state)
{
    static lg_manifest m;
    char dir[LG_PATH_BYTES], made_by[LG_STATE_DEVICE_BYTES];
    snprintf(made_by, sizeof made_by, "of state %" PRIu64, state);
    path_of(w, state, dir);
    if (lg_manifest_load(dir, &m) < 0 || lg_manifest_verify(&m, dir) < 0) return lg_err_message();
    if (m.step != state || m.next_n != state * w->board->s->batch || m.seed != 5)
        return "other numbers in the manifest";
    if (m.optimizer_steps != state + 3 || m.skipped != 2) return "scalars of another state";
    if (m.plan_hash != w->run.plan.hash || m.ranks != w->trainer->ranks ||
        strcmp(m.isa, w->run.plan.isa) != 0 || strcmp(m.fingerprint, made_by))
        return "another plan in the manifest";
    return wrong_numbers(w, dir, state);
}

int ckpt_writer_open(struct ckpt_world *w, lg_stage *st)
{
    attach(w, st, LG_ROLE_ckpt);
    LG_TRY(lg_bus_open(&(struct lg_bus_spec){.runtime_dir = st->runtime_dir,
                                             .role = LG_ROLE_ckpt,
                                             .incarnation = 1,
                                             .plan = &st->plan},
                       &st->bus));
    LG_TRY(lg_ckpt_def.open(st));
    return 0;
}

void ckpt_writer_close(lg_stage *st)
{
    if (st->state) lg_ckpt_def.close(st);
    detach(st);
    lg_bus_close(&st->bus);
}

/* As lgsup does, without which the writer would wait. */
static void give_copies(struct ckpt_world *w)
{
    static lg_keep k;
    const struct lg_board_row *row = lg_board_row(w->board, LG_ROLE_ckpt, 0);
    k = (lg_keep){0};
    LG_ASSERT(lg_keep_init(&k, w->run.dir, w->f.dir, false) == 0);
    for (int i = 0; i < READY_MS_MAX && !atomic_load(&row->ready); i++) usleep(1000);
    LG_ASSERT(atomic_load(&row->uncopied) && lg_keep_refresh(&k) == 0);
    lg_keep_leave(&k);
}

pid_t ckpt_writer_start(struct ckpt_world *w)
{
    char number[16], program[] = "lg-ckpt", run[] = "--run", index[] = "--index", zero[] = "0",
                     incarnation[] = "--incarnation";
    snprintf(number, sizeof number, "%u", lg_board_enlist(w->board, LG_ROLE_ckpt, 0));
    char *argv[] = {program, run, w->run.dir, index, zero, incarnation, number, NULL};
    pid_t child = fork();
    LG_ASSERT(child >= 0);
    if (child) {
        give_copies(w);
        return child;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nothing behind */
    scratch_exit(lg_stage_main(LG_ARRAY_LEN(argv) - 1, argv, &lg_ckpt_def));
}
