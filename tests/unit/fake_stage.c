/* Stages without computing; see fake_stage.h. */
#include "tests/unit/fake_stage.h"
#include "base/heartbeat.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include "shm/keeper.h"
#include "stages/stage.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORWARD_US = 1500, LONG_US = 5000000, PIECE_US = 10000 };

/* What a side must hold in state s. */
static uint64_t expected(uint64_t s)
{
    return s * UINT64_C(0x9E3779B97F4A7C15) + 1;
}

struct fake {
    lg_region *side[2];
};

static bool has_fault(lg_stage *st, const char *kind, bool once)
{
    char path[LG_PATH_BYTES], role[32], what[32];
    int index;
    if (lg_path(path, "%s/fault", st->run_dir) < 0) return false;
    FILE *f = fopen(path, "r");
    if (!f) return false;
    bool mine = fscanf(f, "%31s %d %31s", role, &index, what) == 3 &&
                !strcmp(role, lg_role_name(st->role)) && index == st->index && !strcmp(what, kind);
    fclose(f);
    if (mine && once) unlink(path);
    return mine;
}

/* Work that takes long, in pieces. */
static void work_long(void)
{
    for (int us = 0; us < LONG_US; us += PIECE_US) {
        usleep(PIECE_US);
        lg_heartbeat();
    }
}

static int fake_open(lg_stage *st)
{
    struct fake *f = calloc(1, sizeof *f);
    LG_ASSERT(f);
    st->state = f;
    if (has_fault(st, "crash", false)) /* as long as a path in a folder of models is */
        return LG_FAIL(
            LG_ERR_CORRUPT,
            "/srv/published/models/stable-diffusion-3.5-medium/text_encoder_3/../text_encoder_3/"
            "model-00002-of-00002.safetensors: the weights are damaged");
    if (has_fault(st, "unready", true)) pause();
    if (has_fault(st, "long_setup", true)) work_long();
    if (st->role == LG_ROLE_trainer)
        for (int side = 0; side < 2; side++)
            LG_TRY(lg_stage_region(st, &(struct lg_stage_memory){.bytes = sizeof(uint64_t)},
                                   &f->side[side], "trainer/%d/state/%d", st->index, side));
    else
        LG_TRY(lg_stage_region(st, &(struct lg_stage_memory){.bytes = sizeof(uint64_t)},
                               &f->side[0], "%s/%d/scratch", lg_role_name(st->role), st->index));
    return 0;
}

static uint64_t *side_of(lg_stage *st, uint64_t s)
{
    return ((struct fake *)st->state)->side[s & 1]->payload;
}

static int write_record(lg_stage *st, uint64_t step)
{
    char path[LG_PATH_BYTES];
    uint64_t batch = st->board->s->batch;
    struct lg_ledger_record r = {
        .step = step + 1, .first = step * batch, .last = (step + 1) * batch - 1, .loss = 1};
    lg_ledger_seal(&r);
    LG_TRY(lg_path(path, "%s/ledger", st->run_dir));
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ssize_t n = pwrite(fd, &r, sizeof r, (off_t)(step * sizeof r));
    close(fd);
    return n == (ssize_t)sizeof r ? 0 : LG_FAIL(LG_ERR_IO, "ledger: %s", strerror(errno));
}

static int update(lg_stage *st, uint64_t s)
{
    if (*side_of(st, s) != expected(s))
        return lg_stage_park(st, "memory lost: state %" PRIu64 " is not what it was", s);
    *side_of(st, s + 1) = expected(s + 1);
    if (st->index == 0) LG_TRY(write_record(st, s));
    lg_trainer_mark_commit(st->board, st->index, s);
    return 0;
}

static int trainer_step(lg_stage *st)
{
    struct lg_action a = lg_trainer_next(st->board, st->index);
    switch (a.kind) {
    case LG_DO_INIT:
        *side_of(st, a.step) = expected(a.step);
        lg_trainer_mark_init(st->board, st->index);
        break;
    case LG_DO_DECIDE:
        lg_commit_decide(st->board, a.step);
        break;
    case LG_DO_FORWARD:
        usleep(FORWARD_US);
        lg_trainer_mark_grads(st->board, st->index, a.step, (struct lg_loss_sum){.all = 1});
        break;
    case LG_DO_REDUCE:
        lg_trainer_mark_partial(st->board, st->index, a.step, &(struct lg_exact_sum){0});
        break;
    case LG_DO_UPDATE:
        LG_TRY(update(st, a.step));
        break;
    case LG_DO_DONE:
        return LG_STEP_DONE;
    default:
        return LG_STEP_IDLE;
    }
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static int ema_step(lg_stage *st)
{
    struct lg_action a = lg_ema_next(st->board);
    if (a.kind == LG_DO_DONE) return LG_STEP_DONE;
    if (a.kind != LG_DO_INIT && a.kind != LG_DO_ADVANCE) return LG_STEP_IDLE;
    lg_ema_mark(st->board, a.step);
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static int publish(lg_stage *st, uint64_t s)
{
    char dir[LG_PATH_BYTES], tmp[LG_PATH_BYTES], file[LG_PATH_BYTES], text[32];
    LG_TRY(lg_path(dir, "%s/checkpoints/%s_step%" PRIu64, st->run_dir, st->config->job_name, s));
    if (lg_manifest_exists(dir)) return 0;
    LG_TRY(lg_path(tmp, "%s/checkpoints/.tmp", st->run_dir));
    LG_TRY(lg_remove_tree(tmp));
    LG_TRY(lg_mkdirs(tmp));
    LG_TRY(lg_path(file, "%s/state", tmp));
    int n = snprintf(text, sizeof text, "%" PRIu64 "\n", expected(s));
    LG_TRY(lg_publish_file(file, text, (size_t)n));
    static lg_manifest m;
    m = (lg_manifest){.step = s,
                      .next_n = s * st->board->s->batch,
                      .plan_hash = st->plan.hash,
                      .ranks = st->board->s->ranks,
                      .threads = 1,
                      .fingerprint = "fake"};
    snprintf(m.name, sizeof m.name, "%s", st->config->job_name);
    snprintf(m.isa, sizeof m.isa, "%s", st->plan.isa);
    LG_TRY(lg_manifest_add(&m, tmp, "state"));
    LG_TRY(lg_manifest_save(&m, tmp));
    if (rename(tmp, dir) < 0) return LG_FAIL(LG_ERR_IO, "rename: %s", strerror(errno));
    return 0;
}

static int ckpt_step(lg_stage *st)
{
    struct lg_action a = lg_ckpt_next(st->board);
    switch (a.kind) {
    case LG_DO_STAGE_MOMENTS:
        lg_ckpt_mark_staged_moments(st->board, a.step);
        break;
    case LG_DO_STAGE:
        lg_ckpt_mark_staged(st->board, a.step);
        break;
    case LG_DO_WRITE:
        if (has_fault(st, "long_write", true)) work_long();
        if (has_fault(st, "stuck_write", false)) pause();
        LG_TRY(publish(st, a.step));
        lg_ckpt_mark_published(st->board, a.step);
        break;
    case LG_DO_DONE:
        return LG_STEP_DONE;
    default:
        return LG_STEP_IDLE;
    }
    lg_bus_notify(st->bus);
    return LG_STEP_WORKED;
}

static int fake_step(lg_stage *st)
{
    if (has_fault(st, "park", false)) return lg_stage_park(st, "the data set is empty");
    if (has_fault(st, "hang", true)) pause();
    switch (st->role) {
    case LG_ROLE_trainer:
        return trainer_step(st);
    case LG_ROLE_ema:
        return ema_step(st);
    case LG_ROLE_ckpt:
        return ckpt_step(st);
    default:
        return LG_STEP_IDLE;
    }
}

static int fake_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                      struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    (void)c, (void)p, (void)cap;
    rows[0] = (struct lg_stage_bytes){.name = "fake/0/scratch", .bytes = 8};
    rows[1] = (struct lg_stage_bytes){.name = "private", .bytes = 1 << 20};
    *ret_n = 2;
    return 0;
}

static int fake_sample(int argc, char **argv)
{
    const char *out = NULL, *config = NULL; /* RUN/config.toml */
    char path[LG_PATH_BYTES], *fault;
    size_t bytes;
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "-o"))
            out = argv[i + 1];
        else if (!strcmp(argv[i], "--config"))
            config = argv[i + 1];
    if (!out || !config) return 2;
    if (lg_path(path, "%.*s/sample_fault", (int)(strrchr(config, '/') - config), config) < 0)
        return 2;
    int crash = 0;
    if (lg_read_file(path, 100, &fault, &bytes) == 0) {
        if (!strcmp(fault, "hang")) pause();
        crash = !strcmp(fault, "crash");
        free(fault);
    }
    lg_err_clear();
    if (crash) fputs("a lens is missing\n", stderr);
    return crash ? 5 : lg_publish_file(out, "png", 3) < 0;
}

static int fake_histogram(int argc, char **argv)
{
    static const char text[] =
        "{\"histograms\": [{\"group\": \"fake\", \"min\": 0, \"max\": 0, \"count\": 1, "
        "\"sum\": 0, \"sum_squares\": 0, \"limits\": [1], \"counts\": [1]}]}";
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "-o")) return lg_publish_file(argv[i + 1], text, sizeof text - 1) < 0;
    return 2;
}

int fake_stage_main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];
    if (!strcmp(name, "lg-keeper") && argc == 3)
        return -lg_keeper_serve(argv[1], (int)strtol(argv[2], NULL, 10));
    if (!strcmp(name, "lg-sample")) return fake_sample(argc, argv);
    if (!strcmp(name, "lg-histogram")) return fake_histogram(argc, argv);
    struct lg_stage_def def = {.bytes = fake_bytes, .open = fake_open, .step = fake_step};
    int role = lg_role_find(name + strlen("lg-"));
    if (role < 0) return 2;
    def.role = (lg_role)role;
    return lg_stage_main(argc, argv, &def);
}
