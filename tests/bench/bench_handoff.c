/* Hand-off: from a producer's ready store to the return of a consumer that was blocked on the bus (no
 * spinning), between two processes; and the window's own throughput. Prints JSON lines.
 *
 * Usage: bench_handoff [rounds] [busy]     busy: that many processes compute beside it */
#include "base/clock.h"
#include "bus/wake.h"
#include "shm/window.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BUSY_MAX = 64, PAUSE_US = 1500 };

struct shared {
    _Alignas(64) _Atomic(uint64_t) ready;
    _Alignas(64) _Atomic(uint64_t) taken;
    _Atomic(int64_t) taken_ns;
};

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static pid_t start_child(void)
{
    pid_t p = fork();
    if (p == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return p;
}

static lg_bus *open_bus(const char *dir, const lg_plan *plan, lg_role role)
{
    lg_bus *bus;
    struct lg_bus_spec spec = {.runtime_dir = dir, .role = role, .incarnation = 1, .plan = plan};
    if (lg_bus_open(&spec, &bus) < 0) {
        fprintf(stderr, "bench_handoff: %s\n", lg_err_text());
        exit(1);
    }
    return bus;
}

static void consume(struct shared *s, const char *dir, const lg_plan *plan)
{
    lg_bus *bus = open_bus(dir, plan, LG_ROLE_trainer);
    for (uint64_t n = 1;;) {
        while (atomic_load_explicit(&s->ready, memory_order_acquire) < n) lg_bus_wait(bus, 1000);
        atomic_store(&s->taken_ns, lg_now_ns());
        atomic_store_explicit(&s->taken, n++, memory_order_release);
    }
}

static void handoff(int rounds, int busy)
{
    char dir[] = "/tmp/lg-bench-XXXXXX";
    lg_plan plan = {.instances = {[LG_ROLE_vae] = 1, [LG_ROLE_trainer] = 1}};
    struct shared *s =
        mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t *ns = calloc((size_t)rounds, sizeof *ns);
    pid_t child[BUSY_MAX + 1];
    LG_ASSERT(s != MAP_FAILED && ns && mkdtemp(dir));
    if (!(child[busy] = start_child())) consume(s, dir, &plan);
    for (int i = 0; i < busy; i++)
        if (!(child[i] = start_child()))
            for (volatile double x = 1;;) x = x * 1.0000001;
    lg_bus *bus = open_bus(dir, &plan, LG_ROLE_vae);
    for (int i = -20; i < rounds; i++) {
        uint64_t n = (uint64_t)(i + 21);
        nanosleep(&(struct timespec){0, PAUSE_US * 1000L}, NULL); /* so that the consumer sleeps */
        int64_t start = lg_now_ns();
        atomic_store_explicit(&s->ready, n, memory_order_release);
        lg_bus_notify(bus);
        while (atomic_load_explicit(&s->taken, memory_order_acquire) < n) usleep(20);
        if (i >= 0) ns[i] = atomic_load(&s->taken_ns) - start;
    }
    for (int i = 0; i <= busy; i++) kill(child[i], SIGKILL);
    while (wait(NULL) > 0) {
    }
    lg_bus_close(&bus);
    lg_remove_tree(dir);
    qsort(ns, (size_t)rounds, sizeof *ns, by_value);
    printf("{\"bench\": \"handoff\", \"busy_processes\": %d, \"rounds\": %d, \"p50_us\": %.1f, "
           "\"p99_us\": %.1f}\n",
           busy, rounds, (double)ns[rounds / 2] / 1e3, (double)ns[rounds * 99 / 100] / 1e3);
    free(ns);
}

/* One process claims and publishes every chunk of a window, the commit following behind. */
static void window(void)
{
    const struct lg_window_geometry g = {.slots = 1024,
                                         .batch = 64,
                                         .chunk = {8, 8, 8},
                                         .pixels_bytes = 12288,
                                         .latent_bytes = 8192};
    char path[] = "/tmp/lg-bench-board-XXXXXX";
    void *memory = aligned_alloc(4096, (lg_window_bytes(&g) + 4095) / 4096 * 4096);
    lg_plan plan = {.instances = {[LG_ROLE_trainer] = 1}, .batch = 64};
    const uint64_t steps = 2000;
    lg_board *b;
    lg_window *w;
    int fd = mkstemp(path);
    LG_ASSERT(memory && fd >= 0);
    close(fd);
    memset(memory, 0, lg_window_bytes(&g));
    LG_ASSERT(
        lg_board_create(path, &(struct lg_board_spec){.plan = &plan, .max_steps = steps}, &b) == 0);
    LG_ASSERT(lg_window_over(memory, &g, &w) == 0);
    lg_incarnation me = lg_board_enlist(b, LG_ROLE_loader, 0);
    LG_ASSERT(lg_board_join(b, me) == 0);
    uint8_t *picture = calloc(1, g.pixels_bytes);
    struct lg_board_row *row = lg_board_row(b, LG_ROLE_trainer, 0);
    int64_t start = lg_now_ns();
    for (uint64_t s = 0; s < steps; s++) {
        struct lg_claim c;
        while (lg_window_claim(w, b, me, LG_FIELD_SOURCE, 0, (s + 1) * g.batch, &c) == 0)
            for (uint64_t n = c.from; n < c.to; n++) {
                memcpy(w->pixels + n % g.slots * g.pixels_bytes, picture, g.pixels_bytes);
                lg_window_publish(w, LG_FIELD_SOURCE, n);
            }
        atomic_store(&row->commit, lg_mark_of(s + 1));
    }
    double sec = (double)(lg_now_ns() - start) / 1e9, samples = (double)(steps * g.batch);
    printf("{\"bench\": \"window\", \"samples_per_s\": %.0f, \"ns_per_sample\": %.0f, "
           "\"payload_gb_per_s\": %.2f}\n",
           samples / sec, sec / samples * 1e9, samples * (double)g.pixels_bytes / sec / 1e9);
    free(picture);
    lg_window_close(&w);
    lg_board_close(&b);
    unlink(path);
    free(memory);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 2000, busy = argc > 2 ? atoi(argv[2]) : 0;
    if (rounds < 1 || busy < 0 || busy > BUSY_MAX) {
        fprintf(stderr, "usage: bench_handoff [rounds] [busy processes]\n");
        return 2;
    }
    handoff(rounds, busy);
    if (!busy) window();
    return 0;
}
