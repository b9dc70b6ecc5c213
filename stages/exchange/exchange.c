/* The exchange process of a rank, on each of several hosts: an exchanger (exchanger.h) with the rank's memory. Number 0 also
 * says what all hosts must know of this one's samples. A transport that hangs is killed with its process, and no rank
 * suffers. With one host there is none. */
#include "base/clock.h"
#include "base/log.h"
#include "kernels/ops.h"
#include "stages/exchange/state_bytes.h"
#include "stages/roles.h"
#include "stages/trainer/gradients.h"
#include "stages/trainer/samples.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

/* Messages between GPUs are longer: each is a launch. */
enum { MESSAGE_BYTES = 4 << 20, DEVICE_MESSAGE_BYTES = 16 << 20, END_MS = 500 };

struct exchange {
    lg_device *device; /* which adds: the host, or the rank's GPU where gradients lie there */
    lg_stream *stream;
    bool on_gpu;
    float *parts;
    lg_trainer_state *state;
    lg_state_bytes *bytes;
    struct lg_host_gradients gradients;
    lg_window *window; /* of number 0 */
    lg_exchanger *exchanger;
    double *squares; /* of the device: which an addition makes by the way */
    uint64_t known;  /* steps whose samples have been told: below it */
    int64_t began_ns;
    bool fetched;
    lg_stage *stage;
};

static size_t message_bytes(const lg_config *c)
{
    return lg_host_way_of(c) == LG_HOST_WAY_ON_GPU ? DEVICE_MESSAGE_BYTES : MESSAGE_BYTES;
}

/* The GPU of a rank, where its exchange process has a context. */
static void add_context(const lg_config *c, int rank, size_t parts, struct lg_stage_bytes *rows,
                        int *n)
{
    const bool on_gpu = lg_host_way_of(c) == LG_HOST_WAY_ON_GPU;
    if (lg_plan_gpu(c, LG_ROLE_exchange, rank) < 0) return;
    snprintf(rows[*n].name, sizeof rows[*n].name, "private");
    lg_stage_device_name(c, LG_ROLE_exchange, rank, rows[*n].device);
    rows[*n].bytes = on_gpu ? parts * sizeof(float) : 0;
    rows[(*n)++].processes = 1;
}

static int exchange_bytes(const lg_config *c, const lg_plan *p, lg_role role,
                          struct lg_stage_bytes *rows, int cap, int *ret_n)
{
    struct lg_denoiser_config net;
    lg_params all;
    *ret_n = 0;
    if (p->hosts < 2) return 0;
    if (lg_host_way_of(c) != LG_HOST_WAY_ON_GPU)
        LG_TRY(lg_stage_plan_host_device(c, p, role, "hosts.transport"));
    const int ranks = p->instances[LG_ROLE_trainer];
    LG_ASSERT(cap > ranks);
    LG_TRY(lg_net_table_of(c, p, &net, &all));
    const lg_params trained = lg_params_trained(&all);
    size_t host = 0;
    *ret_n = 1;
    for (int r = 0; r < ranks; r++) {
        const size_t parts = lg_exchanger_parts(lg_shard_count(&trained, r % p->shards, p->shards),
                                                p->hosts, message_bytes(c));
        host += lg_exchanger_bytes(p->hosts, message_bytes(c));
        if (lg_host_way_of(c) != LG_HOST_WAY_ON_GPU) host += parts * sizeof(float);
        add_context(c, r, parts, rows, ret_n);
    }
    lg_params_free(&all);
    snprintf(rows[0].name, sizeof rows[0].name, "private");
    rows[0].bytes = host / (size_t)ranks;
    rows[0].processes = ranks;
    return 0;
}

/* ---- what an exchanger asks for ---- */

static void add(void *arg, float *y, const float *const x[], int n, size_t count)
{
    struct exchange *e = arg;
    const size_t pieces = (count + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
    struct lg_reduce_ranks_args a = {.y = lg_t1(y, LG_F32, (int64_t)count),
                                     .squares = lg_t1(e->squares, LG_F64, (int64_t)pieces)};
    LG_ASSERT(n <= LG_RANKS_MAX);
    for (int h = 0; h < n; h++) a.x[a.count++] = lg_t1((void *)x[h], LG_F32, (int64_t)count);
    lg_reduce_ranks(e->stream, &a);
    lg_stream_sync(e->stream);
}

static size_t state_bytes(void *arg, uint64_t state)
{
    const struct exchange *e = arg;
    return lg_state_bytes_count(e->bytes, state);
}

static bool has_state(void *arg, uint64_t state)
{
    const struct exchange *e = arg;
    return lg_state_bytes_are(e->bytes, state);
}

static int read_state(void *arg, const struct lg_exchanger_state *of, void *to)
{
    struct exchange *e = arg;
    return lg_state_bytes_read(e->bytes, of, to);
}

static int write_state(void *arg, const struct lg_exchanger_state *of, const void *from)
{
    struct exchange *e = arg;
    if (!of->at) e->began_ns = lg_now_ns();
    return lg_state_bytes_write(e->bytes, of, from);
}

static int written(void *arg)
{
    struct exchange *e = arg;
    const double s = (double)(lg_now_ns() - e->began_ns) / LG_S_NS;
    const uint64_t state = e->stage->board->s->start_step;
    lg_state_bytes_end(e->bytes, state);
    lg_log(LG_INFO, "took state %" PRIu64 " from the leading host: %.1f MB in %.2f s", state,
           (double)lg_state_bytes_count(e->bytes, state) / 1e6, s);
    return 0;
}

/* ---- the stage ---- */

static int open_exchanger(lg_stage *st, struct exchange *e)
{
    const struct lg_outgoing_front *front = e->gradients.outgoing->front;
    uint64_t life;
    if (getrandom(&life, sizeof life, 0) != sizeof life)
        return LG_FAIL(LG_ERR_IO, "getrandom fails");
    LG_TRY(lg_exchanger_open(
        &(struct lg_exchanger_spec){.board = st->board,
                                    .rank = st->index,
                                    .transport = e->on_gpu ? &lg_transport_nccl : &lg_transport_ucx,
                                    .transport_arg = e->on_gpu ? e->device : NULL,
                                    .interface = st->config->hosts_interface,
                                    .outgoing = e->gradients.outgoing->payload,
                                    .incoming = e->gradients.incoming->payload,
                                    .outgoing_stamp = e->gradients.outgoing->front,
                                    .leaving = &front->leaving,
                                    .incoming_stamp = e->gradients.incoming->front,
                                    .count = e->gradients.count,
                                    .parts = e->parts,
                                    .on_device = e->on_gpu,
                                    .message_bytes = message_bytes(st->config),
                                    .state_bytes = state_bytes,
                                    .arg = e,
                                    .add = add,
                                    .has_state = has_state,
                                    .read = read_state,
                                    .write = write_state,
                                    .written = written,
                                    .now = lg_now_ns,
                                    .life = life | 1},
        &e->exchanger));
    return 0;
}

/* Of the device that adds. */
static int open_memory(lg_stage *st, struct exchange *e)
{
    const size_t parts =
        lg_exchanger_parts(e->gradients.count, st->plan.hosts, message_bytes(st->config));
    const size_t pieces = message_bytes(st->config) / sizeof(float) / LG_SQUARES_PIECE + 1;
    void *memory;
    LG_TRY(lg_device_alloc(e->device, LG_MAX(parts, (size_t)1) * sizeof *e->parts, &memory));
    e->parts = memory;
    LG_TRY(lg_device_alloc(e->device, pieces * sizeof *e->squares, &memory));
    e->squares = memory;
    return 0;
}

/* Of its own rank alone it moves the state; of the others the fronts are enough. */
static int open_state(lg_stage *st, struct exchange *e)
{
    lg_device *maps[LG_INSTANCES_MAX] = {0}, *own;
    LG_TRY(lg_state_device(st, st->index, &own));
    for (int r = 0; r < LG_INSTANCES_MAX; r++)
        if (r == st->index || lg_device_is_host(own)) maps[r] = own;
    LG_TRY(lg_trainer_state_open(st, maps, &e->state));
    LG_TRY(lg_state_bytes_open(st, own, e->state, &e->bytes));
    return 0;
}

static int exchange_open(lg_stage *st)
{
    struct exchange *e = calloc(1, sizeof *e);
    LG_ASSERT(e);
    st->state = e;
    e->stage = st;
    e->known = st->board->s->start_step;
    e->on_gpu = lg_host_way_of(st->config) == LG_HOST_WAY_ON_GPU;
    if (e->on_gpu)
        LG_TRY(lg_stage_device(st, LG_ROLE_trainer, st->index, &e->device));
    else
        LG_TRY(lg_stage_host_device(st, LG_ROLE_exchange, &e->device));
    LG_TRY(lg_stream_open(e->device, &e->stream));
    LG_TRY(open_state(st, e));
    LG_TRY(lg_host_gradients_open(st, e->on_gpu ? e->device : NULL, e->state, &e->gradients));
    if (st->index == 0) LG_TRY(lg_stage_window(st, NULL, &e->window));
    LG_TRY(open_memory(st, e));
    return open_exchanger(st, e);
}

/* Of the steps after the least commit: when their sources are there. */
static int tell_samples(lg_stage *st, struct exchange *e)
{
    lg_board *b = st->board;
    const lg_mark commit = lg_board_global_commit(b);
    const uint64_t at = commit == LG_MARK_NONE ? b->s->start_step : lg_mark_state(commit);
    struct lg_host_sums own;
    if (!e->window) return 0;
    e->known = LG_MAX(e->known, at);
    if (lg_hosts_has_info(b, e->known)) e->known++;
    if (e->known > at + 1 || e->known * b->s->batch >= lg_stage_end(st)) return 0;
    if (lg_hosts_has_info(b, e->known)) return 1;
    if (!lg_samples_of_host(b, e->window, e->known, &own)) return 0;
    lg_hosts_set_info(b, e->known, &own);
    return 1;
}

static int exchange_step(lg_stage *st)
{
    struct exchange *e = st->state;
    const int told = tell_samples(st, e);
    const int rc = lg_exchanger_step(e->exchanger, &st->waiting_for);
    if (rc == LG_ERR_CORRUPT) return lg_stage_lost(st, "%s", lg_err_message());
    LG_TRY(rc);
    lg_log_set_step((int64_t)lg_exchange_next(st->board, st->index));
    if (told || rc) {
        lg_bus_notify(st->bus);
        return LG_STEP_WORKED;
    }
    if (!lg_exchanger_sleeps(e->exchanger)) return LG_STEP_WORKED;
    lg_bus_also(st->bus, lg_exchanger_fd(e->exchanger));
    return lg_commit_complete(st->board) ? LG_STEP_DONE : LG_STEP_IDLE;
}

static void exchange_close(lg_stage *st)
{
    struct exchange *e = st->state;
    if (e->exchanger && lg_commit_complete(st->board)) lg_exchanger_end(e->exchanger, END_MS);
    lg_exchanger_close(&e->exchanger);
    lg_state_bytes_close(&e->bytes);
    lg_stream_close(&e->stream);
    lg_trainer_state_close(&e->state);
    lg_window_close(&e->window);
    free(e);
    st->state = NULL;
}

const struct lg_stage_def lg_exchange_def = {
    .role = LG_ROLE_exchange,
    .bytes = exchange_bytes,
    .open = exchange_open,
    .step = exchange_step,
    .close = exchange_close,
};
