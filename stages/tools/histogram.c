/* lg-histogram: counts how the weights of a checkpoint are spread, for TensorBoard. On the CPU, from
 * the files alone: it needs no device and nobody who trains notices it. */
#include "stages/ckpt/histogram.h"
#include "base/log.h"
#include "base/printable.h"
#include "stages/ckpt/checkpoint.h"
#include "stages/tools/owner.h"
#include <getopt.h>
#include <stdio.h>

static const char usage_text[] =
    "usage: lg-histogram --from CHECKPOINT -o OUT.json [options]\n"
    "  --weights ema|model   which weights of it (default ema)\n"
    "  --owner PID           end when this process, which must be our parent, has died";

static int run(int argc, char **argv)
{
    static const struct option longs[] = {{"from", required_argument, 0, 'f'},
                                          {"out", required_argument, 0, 'o'},
                                          {"weights", required_argument, 0, 'w'},
                                          {"owner", required_argument, 0, 'O'},
                                          {0}};
    const char *from = NULL, *out = NULL, *which = "ema", *owner = NULL;
    char weights[LG_PATH_BYTES];
    for (int c; (c = getopt_long(argc, argv, "o:", longs, NULL)) != -1;) {
        const char **value = c == 'f' ? &from : c == 'o' ? &out : c == 'w' ? &which : &owner;
        if (c == '?') return LG_FAIL(LG_ERR_USAGE, "%s", usage_text);
        *value = optarg;
    }
    if (!from || !out || optind != argc) return LG_FAIL(LG_ERR_USAGE, "%s", usage_text);
    LG_TRY(lg_end_with(owner));
    LG_TRY(lg_checkpoint_weights_dir(from, which, weights));
    LG_TRY(lg_histograms_write(weights, out));
    lg_print(stdout, "%s: histograms of %s\n", out, weights);
    return 0;
}

int main(int argc, char **argv)
{
    lg_log_set_role("histogram");
    int rc = run(argc, argv);
    if (rc < 0) fprintf(stderr, "lg-histogram: %s\n", lg_err_message());
    return -rc;
}
