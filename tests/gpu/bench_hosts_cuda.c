/* How fast two hosts add up a rank's gradient: two processes with production's exchangers (stages/exchange), one each, over
 * loopback or what NCCL finds, and pretended ranks whose gradients leave them unit by unit.
 *
 * usage: bench_hosts_cuda TRANSPORT DEVICE MB STEPS [BACKWARD_MS [UNITS]]
 *   TRANSPORT     ucx or nccl; DEVICE: of nccl, cuda (host h: cuda:h); of ucx, host
 *   MB            of the rank's gradient; BACKWARD_MS: time in which UNITS (28) units leave, one after the other; 0: all at once
 * BENCH_HOSTS_INTERFACE: hosts.interface.
 *
 * Prints of host 0: ms from the end of the backward to the whole sum, median and longest; and GB/s of what leaves the host in
 * that time, which is a rate of the network where BACKWARD_MS is 0. The sums are compared with what they must be. */
#include "base/clock.h"
#include "kernels/ops.h"
#include "stages/exchange/exchanger.h"
#include "tests/gpu/gpu_test.h"
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HOSTS = 2, MESSAGE_HOST = 4 << 20, MESSAGE_DEVICE = 16 << 20, LIMIT_S = 60, SQUARES = 4096 };

/* Steps for which a host is ready: both begin together. */
static _Atomic(uint64_t) *g_ready; /* (HOSTS), shared */

struct host {
    lg_board board;
    lg_device *device;
    lg_stream *stream;
    float *outgoing, *incoming, *parts;
    double *squares;
    size_t count;
    struct lg_stamp out, in;
    struct lg_leaving leaving;
    lg_exchanger *x;
};

static void add(void *arg, float *y, const float *const x[], int n, size_t count)
{
    struct host *h = arg;
    const int64_t pieces = (int64_t)((count + SQUARES - 1) / SQUARES);
    struct lg_reduce_ranks_args a = {.y = lg_t1(y, LG_F32, (int64_t)count),
                                     .squares = lg_t1(h->squares, LG_F64, pieces)};
    for (int i = 0; i < n; i++) a.x[a.count++] = lg_t1((void *)x[i], LG_F32, (int64_t)count);
    lg_reduce_ranks(h->stream, &a);
    lg_stream_sync(h->stream);
}

static size_t state_bytes(void *arg, uint64_t state)
{
    (void)arg, (void)state;
    return 0;
}

static bool has_state(void *arg, uint64_t state)
{
    (void)arg, (void)state;
    return false;
}

static float *memory(struct host *h, size_t bytes)
{
    void *p;
    gpu_need(lg_device_alloc(h->device, bytes, &p));
    return p;
}

static struct lg_board_row *row(struct host *h, lg_role role)
{
    return lg_board_row(&h->board, role, 0);
}

static void open_board(struct host *h, int number, uint32_t port)
{
    struct lg_board_shared *s = calloc(1, sizeof *s);
    LG_ASSERT(s);
    struct lg_hosts_record e = {.formation = 1, .number = 1, .members = lg_hosts_all(HOSTS)};
    *s = (struct lg_board_shared){.max_steps = UINT32_MAX, .batch = 1, .ranks = 1, .sequence = 1};
    s->hosts.count = HOSTS;
    s->hosts.host = number;
    s->hosts.life = (uint64_t)number + 1;
    h->board = (lg_board){s, -1};
    for (int i = 0; i < HOSTS; i++) {
        snprintf(e.member[i].address, sizeof e.member[i].address, "127.0.0.1");
        e.member[i].port = port + (uint32_t)i;
        e.member[i].life = (uint64_t)i + 1;
    }
    lg_hosts_enter(&h->board, &e);
    atomic_store(&row(h, LG_ROLE_trainer)->commit, lg_mark_of(0));
}

static void fill(struct host *h, int number, uint64_t step)
{
    float *v = malloc(h->count * sizeof *v);
    LG_ASSERT(v);
    for (size_t i = 0; i < h->count; i++) v[i] = (float)((i % 1000) * (size_t)(number + 1) + step);
    lg_stream_upload(h->stream, h->outgoing, v, h->count * sizeof *v);
    lg_stream_sync(h->stream);
    free(v);
}

static bool is_sum(struct host *h, uint64_t step)
{
    float *v = malloc(h->count * sizeof *v);
    bool ok = true;
    LG_ASSERT(v);
    lg_stream_download(h->stream, v, h->incoming, h->count * sizeof *v);
    lg_stream_sync(h->stream);
    for (size_t i = 0; i < h->count && ok; i++)
        ok = v[i] == (float)((i % 1000) + step) + (float)((i % 1000) * 2 + step);
    free(v);
    return ok;
}

static void turn(struct host *h, int64_t limit)
{
    const char *why;
    const int rc = lg_exchanger_step(h->x, &why);
    if (rc < 0) gpu_need(rc);
    if (lg_now_ns() < limit) return;
    fprintf(stderr, "waited %d s for %s\n", LIMIT_S, why);
    exit(1);
}

/* ms from the end of the backward to the whole sum. */
static double step(struct host *h, uint64_t s, int64_t backward_ns, int units)
{
    const int64_t patience = lg_now_ns() + LIMIT_S * LG_S_NS;
    atomic_store(&g_ready[h->board.s->hosts.host], s + 1);
    for (int i = 0; i < HOSTS; i++)
        while (atomic_load(&g_ready[i]) < s + 1) turn(h, patience);
    const int64_t begin = lg_now_ns(), limit = begin + LIMIT_S * LG_S_NS + backward_ns;
    struct lg_board_row *rank = row(h, LG_ROLE_trainer);
    lg_stamp_set(&h->out, s);
    for (int u = 1; u <= units && backward_ns; u++) {
        while (lg_now_ns() < begin + backward_ns * u / units) turn(h, limit);
        lg_leaving_mark(&h->leaving, s, h->count * (size_t)u / (size_t)units);
    }
    const int64_t end = lg_now_ns();
    atomic_store(&rank->grads, lg_mark_of(s));
    atomic_store(&rank->local, lg_mark_of(s));
    while (atomic_load(&row(h, LG_ROLE_exchange)->exchanged) != lg_mark_of(s)) turn(h, limit);
    const double ms = (double)(lg_now_ns() - end) * 1e-6;
    while (!lg_hosts_have_exchanged(&h->board, s)) turn(h, limit);
    atomic_store(&rank->partial, lg_mark_of(s));
    return ms;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int run(int number, char **argv, int argc, uint32_t port)
{
    const bool on_device = !strcmp(argv[1], "nccl");
    const size_t message = on_device ? MESSAGE_DEVICE : MESSAGE_HOST;
    const int steps = atoi(argv[4]), units = argc > 6 ? atoi(argv[6]) : 28;
    const int64_t backward = (argc > 5 ? atoi(argv[5]) : 0) * LG_MS_NS;
    struct host h = {.count = (size_t)atoi(argv[3]) * 1000000 / sizeof(float)};
    char name[32];
    snprintf(name, sizeof name, on_device ? "%s:%d" : "%s", argv[2], number);
    h.device = gpu_open(name, NULL);
    gpu_need(lg_stream_open(h.device, &h.stream));
    const size_t bytes = h.count * sizeof(float);
    h.outgoing = memory(&h, bytes);
    h.incoming = memory(&h, bytes);
    h.parts = memory(&h, lg_exchanger_parts(h.count, HOSTS, message) * sizeof(float));
    h.squares = (double *)memory(&h, (message / sizeof(float) / SQUARES + 1) * sizeof(double));
    open_board(&h, number, port);
    gpu_need(lg_exchanger_open(
        &(struct lg_exchanger_spec){.board = &h.board,
                                    .transport = on_device ? &lg_transport_nccl : &lg_transport_ucx,
                                    .transport_arg = h.device,
                                    .interface = getenv("BENCH_HOSTS_INTERFACE"),
                                    .outgoing = h.outgoing,
                                    .incoming = h.incoming,
                                    .outgoing_stamp = &h.out,
                                    .incoming_stamp = &h.in,
                                    .leaving = &h.leaving,
                                    .count = h.count,
                                    .parts = h.parts,
                                    .on_device = on_device,
                                    .message_bytes = message,
                                    .arg = &h,
                                    .add = add,
                                    .state_bytes = state_bytes,
                                    .has_state = has_state,
                                    .now = lg_now_ns,
                                    .life = (uint64_t)lg_now_ns() | 1},
        &h.x));
    double *ms = calloc((size_t)steps, sizeof *ms);
    bool ok = true;
    LG_ASSERT(ms);
    for (int s = 0; s <= steps; s++) { /* the first one connects */
        fill(&h, number, (uint64_t)s);
        const double took = step(&h, (uint64_t)s, backward, units);
        ok = ok && is_sum(&h, (uint64_t)s);
        atomic_store(&row(&h, LG_ROLE_trainer)->commit, lg_mark_of((uint64_t)s + 1));
        if (s) ms[s - 1] = took;
    }
    lg_exchanger_end(h.x, 500);
    qsort(ms, (size_t)steps, sizeof *ms, compare);
    if (number == 0)
        printf("%s, %s MB, backward %d ms: %.1f ms behind it (longest %.1f), %.2f GB/s out of a "
               "host%s\n",
               argv[1], argv[3], (int)(backward / LG_MS_NS), ms[steps / 2], ms[steps - 1],
               (double)bytes / ms[steps / 2] * 1e-6, ok ? "" : ", WRONG SUMS");
    lg_exchanger_close(&h.x);
    lg_stream_close(&h.stream);
    lg_device_close(&h.device);
    return !ok;
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr,
                "usage: bench_hosts_cuda ucx|nccl host|cuda MB STEPS [BACKWARD_MS [UNITS]]\n");
        return 2;
    }
    const uint32_t port = 20000 + (uint32_t)getpid() % 12000;
    g_ready = mmap(NULL, HOSTS * sizeof *g_ready, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    LG_ASSERT(g_ready != MAP_FAILED);
    const pid_t other = fork();
    const int rc = run(other == 0, argv, argc, port);
    if (other == 0) return rc;
    int status;
    waitpid(other, &status, 0);
    return rc || status != 0;
}
