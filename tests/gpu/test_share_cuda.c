/* Memory on GPUs that outlives its processes: regions whose payload lies on a GPU, and the fence: once
 * the pidfd of a killed process has fired, nothing of it writes any more.
 *
 * The parent has no CUDA; it forks a keeper, one process that looks, and again and again a writer that
 * is killed in the middle of its work. FENCE=N sets the number of kills (default 24): two thirds on a region of a GPU, a
 * third on one of the host that a GPU has mapped (lg_device_map_host). With LG_CUDA_NO_PEER=1 no other GPU writes into
 * that of cuda:0, which is refused.
 *
 * What a writer does when it is killed: kernels, copies on the GPU, copies from the host, copies to the
 * host (into the front of the region), and all of these from another GPU when there is one. */
#include "kernels/ops.h"
#include "shm/keeper.h"
#include "shm/region.h"
#include "tests/gpu/gpu_test.h"
#include <poll.h>
#include <signal.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

enum { PAYLOAD_BYTES = 256 << 20, FRONT_BYTES = 64 << 20, KILLS = 24, WAIT_MS_MAX = 60000 };
enum { LOOKS = 2, LOOK_PAUSE_US = 20000, GPUS_TRIED = 2 };
enum writer { KERNEL, COPY, FROM_HOST, TO_HOST, WRITERS };
static const char *const writer_name[] = {"kernels", "copies", "copies from the host",
                                          "copies to the host"};

static char keeper[64];

static int place_create(const struct lg_region_place *p, size_t bytes, int *ret_fd)
{
    return lg_device_share(p->device, p->gpu, bytes, ret_fd);
}

static int place_map(const struct lg_region_place *p, int fd, size_t bytes, void **ret)
{
    return lg_device_map(p->device, fd, bytes, ret);
}

static void place_unmap(const struct lg_region_place *p, void *at, size_t bytes)
{
    lg_device_unmap(p->device, at, bytes);
}

static int place_map_host(const struct lg_region_place *p, void *host, size_t bytes, void **ret)
{
    return lg_device_map_host(p->device, host, bytes, ret);
}

/* Memory of cuda:0, or of the host, seen from d. */
static lg_region *open_region(lg_device *d, bool host)
{
    struct lg_region_place place = {.device = d,
                                    .create = place_create,
                                    .map = place_map,
                                    .unmap = place_unmap,
                                    .map_host = place_map_host};
    lg_region *r;
    if (!host) strcpy(place.name, "cuda:0");
    gpu_need(
        lg_region_open(&(struct lg_region_spec){.keeper = keeper,
                                                .name = host ? "test/1/region" : "test/0/region",
                                                .bytes = PAYLOAD_BYTES,
                                                .front_bytes = FRONT_BYTES,
                                                .place = &place},
                       &r));
    return r;
}

/* t *= 2 or 1/2 in turn. */
static void scale(lg_stream *s, lg_tensor t, unsigned i)
{
    struct lg_combine_args a = {.c = {i % 2 ? 2 : 0.5}, .count = 1, .y = t};
    a.x[0] = t;
    lg_combine(s, &a);
}

/* Half of the payload is written over and over, with ever other values, until the process is killed. */
static void write_for_ever(int gpu, bool host, enum writer what, int ready)
{
    const size_t half = PAYLOAD_BYTES / 2;
    const int64_t n = (int64_t)(half / sizeof(float));
    lg_device *d = gpu_open(gpu ? "cuda:1" : "cuda:0", "fp32");
    lg_stream *s;
    void *own;
    lg_region *r = open_region(d, host);
    gpu_need(lg_stream_open(d, &s));
    gpu_need(lg_device_alloc(d, half, &own));
    gpu_need(lg_device_pin(d, r->front, FRONT_BYTES));
    lg_tensor x = lg_t1(own, LG_F32, n), y = lg_t1(r->payload, LG_F32, n);
    memset(r->front, 0x3f, FRONT_BYTES);
    for (size_t at = 0; at < half; at += FRONT_BYTES)
        lg_stream_upload(s, (char *)own + at, r->front, FRONT_BYTES);
    lg_stream_copy(s, r->payload, own, half);
    lg_stream_sync(s);
    LG_ASSERT(write(ready, "r", 1) == 1);
    for (unsigned i = 1;; i++) {
        scale(s, x, i);
        if (what == KERNEL) scale(s, y, i);
        if (what == FROM_HOST) memset(r->front, (int)i, FRONT_BYTES);
        if (what == COPY) lg_stream_copy(s, r->payload, own, half);
        if (what == FROM_HOST) lg_stream_upload(s, r->payload, r->front, FRONT_BYTES);
        if (what == TO_HOST) lg_stream_download(s, r->front, own, FRONT_BYTES);
        if (i % 8 == 0) lg_stream_sync(s);
    }
}

/* For each byte that comes in: the region's hash, LOOKS times; answers 'y' when it stays the same. */
static void look_for_ever(int in, int out)
{
    lg_device *d = gpu_open("cuda:0", "fp32");
    lg_region *of[] = {open_region(d, false), open_region(d, true)};
    lg_stream *s;
    char *copy = malloc(PAYLOAD_BYTES), byte;
    gpu_need(lg_stream_open(d, &s));
    gpu_need(lg_device_pin(d, copy, PAYLOAD_BYTES));
    LG_ASSERT(copy);
    memset(copy, 0x3c, PAYLOAD_BYTES);
    for (int i = 0; i < 2; i++) lg_stream_copy(s, of[i]->payload, copy, PAYLOAD_BYTES);
    lg_stream_sync(s);
    LG_ASSERT(write(out, "r", 1) == 1);
    while (read(in, &byte, 1) == 1) {
        const lg_region *r = of[byte == 'h'];
        uint64_t hash[LOOKS];
        for (int i = 0; i < LOOKS; i++) {
            lg_stream_download(s, copy, r->payload, PAYLOAD_BYTES);
            lg_stream_sync(s);
            hash[i] = XXH3_64bits(copy, PAYLOAD_BYTES) ^ XXH3_64bits(r->front, FRONT_BYTES);
            usleep(LOOK_PAUSE_US);
        }
        /* The half that nobody wrote survives its writers. */
        bool kept = true;
        for (size_t i = PAYLOAD_BYTES / 2; i < PAYLOAD_BYTES; i += 4097) kept &= copy[i] == 0x3c;
        LG_ASSERT(write(out, hash[0] == hash[1] && kept ? "y" : "n", 1) == 1);
    }
    _exit(0);
}

/* -1: none came in time. */
static int answer(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char byte;
    return poll(&p, 1, WAIT_MS_MAX) == 1 && read(fd, &byte, 1) == 1 ? byte : -1;
}

static bool kill_one(int gpu, bool host, enum writer what, int ask, int told)
{
    int ready[2];
    LG_ASSERT(pipe(ready) == 0);
    pid_t pid = fork();
    if (!pid) {
        close(ready[0]);
        write_for_ever(gpu, host, what, ready[1]);
    }
    close(ready[1]);
    bool ok = answer(ready[0]) == 'r';
    close(ready[0]);
    usleep(5000 + (useconds_t)(rand() % 60000));
    int pidfd = pidfd_open(pid, 0);
    kill(pid, SIGKILL);
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    ok = ok && poll(&p, 1, WAIT_MS_MAX) == 1;
    ok = ok && write(ask, host ? "h" : "l", 1) == 1 && answer(told) == 'y';
    int status = 0;
    waitpid(pid, &status, 0);
    close(pidfd);
    /* It was at work until then. */
    return ok && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

/* In a process of its own: the parent has no CUDA. */
static int count_gpus(void)
{
    pid_t pid = fork();
    if (!pid) {
        int n = 0;
        char name[16];
        for (lg_device *d = NULL; n < GPUS_TRIED; n++, lg_device_close(&d)) {
            snprintf(name, sizeof name, "cuda:%d", n);
            if (lg_device_open(name, NULL, &d) < 0) break;
        }
        _exit(n);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WEXITSTATUS(status);
}

/* In a process of its own. */
static bool is_refused(void)
{
    pid_t pid = fork();
    if (!pid) {
        int fd = -1;
        lg_device *d = gpu_open("cuda:1", "fp32");
        _exit(lg_device_share(d, 0, PAYLOAD_BYTES, &fd) == LG_ERR_CONFIG &&
                      strstr(lg_err_message(), "LG_CUDA_NO_PEER")
                  ? 0
                  : 1);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    return status == 0;
}

int main(void)
{
    const char *wanted = getenv("FENCE");
    int kills = wanted ? atoi(wanted) : KILLS, ask[2], told[2], ready[2], gpus = count_gpus();
    const bool no_peer = getenv("LG_CUDA_NO_PEER") != NULL;
    snprintf(keeper, sizeof keeper, "/tmp/lg-share-%d", (int)getpid());
    LG_ASSERT(pipe(ready) == 0 && pipe(ask) == 0 && pipe(told) == 0);
    pid_t server = fork();
    if (!server) _exit(-lg_keeper_serve(keeper, ready[1]));
    gpu_count(gpus > 0 && answer(ready[0]) >= 0);
    pid_t looker = fork();
    if (!looker) {
        close(ask[1]);
        look_for_ever(ask[0], told[1]);
    }
    gpu_count(answer(told[0]) == 'r');
    if (no_peer && gpus > 1) gpu_count(is_refused());
    for (int i = 0; i < kills; i++) {
        enum writer what = (enum writer)(i % WRITERS);
        const bool host = i / WRITERS % 3 == 2;
        const int gpu = gpus > 1 && (i / WRITERS % 3 == 1 || (host && i / WRITERS % 2));
        bool ok = kill_one(gpu && (host || !no_peer), host, what, ask[1], told[0]);
        if (!ok)
            printf("FAIL kill %d: %s of cuda:%d%s went on after its pidfd, or memory was lost\n", i,
                   writer_name[what], gpu, host ? " in host memory" : "");
        gpu_count(ok);
        if ((i + 1) % 50 == 0) printf("# %d of %d killed\n", i + 1, kills);
    }
    printf("%d writers killed on %d GPU%s\n", kills, gpus, gpus == 1 ? "" : "s");
    kill(looker, SIGKILL);
    kill(server, SIGKILL);
    while (wait(NULL) > 0) {
    }
    unlink(keeper);
    return gpu_summary();
}
