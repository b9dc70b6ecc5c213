/* What a run of up to 1,024 hosts would take, from constants that were measured on few: time of a step, traffic, recovery. A
 * model, not a measurement: docs/scale.md has its tables and says what it leaves out.
 *
 *     scale_model [--gbits 400] [--links 1] [--threads 8] [--hide 0.65] [--on-gpu 0]
 *
 * gbits, links: of a host's network, that many links of so many Gb/s. threads: that add, of each exchange process. hide: share of
 * the step behind which the exchange goes on: with zero = 2 and 3 the backward, 0.65 of a step; 0: zero = 0 and 1. on-gpu: 1:
 * hosts.transport = "nccl": no bus, and the GPU adds.
 *
 * Of a step of H hosts, each with G ranks that own a G-th of the P trained parameters each:
 *
 *   bus        a shard from the GPU's memory into the host's, and back, over the rank's own bus; back when all is there
 *   wire       each rank sends and receives 2 (H - 1) / H of its shard; the ranks of a host share its links
 *   add        each rank reads (H + 1) / H of its shard and writes 1 / H of it, in the host's memory; pieces are added while
 *              others are on their way, so the longer of both counts, and one piece of the other
 *   last unit  what leaves the backward last has nothing to go on behind: a share of all that, one of so many units
 *   messages   (H - 1) questions, answers and losses, a few microseconds each, by one thread; and, by exchange 0, three cards
 *   slowest    all wait for the slowest: the largest of H normal draws is about sigma sqrt(2 ln H) above the mean */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct constants {
    const char *name;
    double parameters, step_ms; /* of a host with one GPU, B = 256 */
    int ranks;
    double state_bytes; /* a parameter: weights once, moments, average, as a newcomer takes them */
};

static const double g_bus = 55e9;     /* pinned memory of an H200's machine, each way: measured */
static const double g_add_core = 5e9; /* bytes read and written a second by one thread: measured */
static const double g_add_memory = 200e9; /* of a machine with eight memory channels: assumed */
static const double g_wire_share = 0.9;   /* of the line's rate for payload: assumed */
static const double g_message_us =
    8; /* of the exchanging thread: half a round trip while it polls */
static const double g_card_us = 8;
static const double g_sigma = 0.004; /* of a step: 319 to 332 ms in 20, docs/gpu-results.md */
static const double g_noise_s = 0.6, g_stages_s = 1.4, g_fetch = 2.2e9;
static const double g_message_bytes = 4 << 20;
static const double g_units = 30;     /* of DiT-XL/2 */
static const double g_add_gpu = 3e12; /* of bytes read and written: three quarters of a copy's */

static double larger(double a, double b)
{
    return a > b ? a : b;
}

struct result {
    double step_ms, wire_ms, add_ms, bus_ms, talk_ms, wait_ms, efficiency, out_gb, recovery_s;
};

struct network {
    double gbits, hide; /* of all links of a host */
    int threads;
    bool on_gpu;
};

static struct result model(const struct constants *c, int hosts, const struct network *n)
{
    const double h = hosts, bytes = 4 * c->parameters / c->ranks; /* of a rank's shard, fp32 */
    const double line = n->gbits / 8 * 1e9 * g_wire_share / c->ranks;
    const double host_rate = fmin(n->threads * g_add_core, g_add_memory / c->ranks);
    const double add_rate = n->on_gpu ? g_add_gpu : host_rate;
    struct result r = {0};
    double back_ms = 0;
    if (hosts > 1) {
        const double piece = fmin(g_message_bytes, bytes / h);
        r.bus_ms = n->on_gpu ? 0 : 2e3 * bytes / g_bus;
        r.wire_ms = 1e3 * 2 * (h - 1) / h * bytes / line;
        r.add_ms = 1e3 * (h + 2) / h * bytes / add_rate;
        r.talk_ms = 1e-3 * ((h - 1) * 6 * g_message_us + 3 * (h - 1) * g_card_us);
        r.wait_ms = c->step_ms * g_sigma * sqrt(2 * log(h));
        back_ms = r.bus_ms / 2;
        r.step_ms = larger(r.wire_ms, r.add_ms) + 1e3 * piece / fmin(line, add_rate) + back_ms;
        if (n->hide > 0) r.step_ms = larger(r.step_ms - n->hide * c->step_ms, r.step_ms / g_units);
        r.out_gb = 2 * (h - 1) / h * bytes * c->ranks / 1e9;
    }
    r.step_ms += c->step_ms + back_ms + r.talk_ms + r.wait_ms;
    r.efficiency = c->step_ms / r.step_ms;
    r.recovery_s = g_noise_s + g_stages_s +
                   c->state_bytes * c->parameters /
                       fmin(g_fetch * c->ranks, n->gbits / 8 * 1e9 * g_wire_share) +
                   r.step_ms / 1e3;
    return r;
}

int main(int argc, char **argv)
{
    static const struct constants all[] = {{"DiT-XL/2, 1 GPU a host", 675e6, 328.0, 1, 16},
                                           {"DiT-XL/2, 8 GPUs a host", 675e6, 328.0 / 0.973, 8, 16},
                                           {"12 G parameters, 8 GPUs", 12e9, 2000, 8, 16}};
    static const int hosts[] = {1, 2, 4, 8, 16, 64, 256, 1024};
    struct network n = {.gbits = 400, .threads = 8, .hide = 0.65};
    double links = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--gbits")) n.gbits = atof(argv[i + 1]);
        if (!strcmp(argv[i], "--links")) links = atof(argv[i + 1]);
        if (!strcmp(argv[i], "--threads")) n.threads = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--on-gpu")) n.on_gpu = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--hide")) n.hide = atof(argv[i + 1]);
    }
    n.gbits *= links;
    printf("%.0f Gb/s a host, behind %.2f of a step, ", n.gbits, n.hide);
    printf(n.on_gpu ? "the GPU adds\n" : "%d threads add\n", n.threads);
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        printf("\n%s: a step of one host %.0f ms\n", all[k].name, all[k].step_ms);
        printf("%6s %9s %6s %8s %8s %8s %8s %8s %9s %10s\n", "hosts", "step ms", "eff.", "wire",
               "add", "bus", "messages", "slowest", "GB out", "recovery s");
        for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
            const struct result r = model(&all[k], hosts[i], &n);
            printf("%6d %9.1f %6.3f %8.1f %8.1f %8.1f %8.2f %8.1f %9.2f %10.1f\n", hosts[i],
                   r.step_ms, r.efficiency, r.wire_ms, r.add_ms, r.bus_ms, r.talk_ms, r.wait_ms,
                   r.out_gb, r.recovery_s);
        }
    }
    return 0;
}
