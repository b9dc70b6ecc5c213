/* lg-merge: a low-rank adapter added to the net that it adapts, as a transformer in diffusers' layout. What
 * `lgsup export --merge` runs. Or, with --kohya, what `lgsup export --format kohya` runs: the adapter alone in that layout. */
#include "base/fs.h"
#include "stages/nets/adapter_file.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int merge(const char *from, const char *to)
{
    struct lg_denoiser_config c;
    char base[LG_PATH_BYTES], source[LG_PATH_BYTES];
    lg_params t;
    if (!lg_adapter_is(from))
        return LG_FAIL(LG_ERR_USAGE, "%s holds no adapter (" LG_ADAPTER_CONFIG ")", from);
    LG_TRY(lg_whole_config_load(from, &c));
    LG_TRY(lg_adapter_base(from, base));
    LG_TRY(lg_path(source, "%s/config.json", base));
    LG_TRY(lg_mkdirs(to));
    LG_TRY(lg_denoiser_params(&c, &t));
    float *w = malloc(t.count * sizeof *w);
    int rc = w ? lg_whole_load(&c, from, w)
               : LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu weights", t.count);
    if (rc == 0)
        rc = lg_denoiser_save(
            &c, to, &(struct lg_denoiser_weights){.t = &t, .trained = w, .source = source});
    free(w);
    lg_params_free(&t);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int main(int argc, char **argv)
{
    const bool kohya = argc == 4 && !strcmp(argv[1], "--kohya");
    if (argc != 3 && !kohya) {
        fprintf(stderr, "usage: lg-merge ADAPTER_DIR OUT_DIR\n"
                        "       lg-merge --kohya ADAPTER_DIR OUT.safetensors\n"
                        "  ADAPTER_DIR  a checkpoint's adapter or ema folder\n");
        return -LG_ERR_USAGE;
    }
    int rc = kohya ? lg_adapter_export_kohya(argv[2], argv[3]) : merge(argv[1], argv[2]);
    if (rc < 0) fprintf(stderr, "lg-merge: %s\n", lg_err_text());
    return -rc;
}
