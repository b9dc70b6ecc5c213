/* See decode_noise.h. */
#include "stages/sample/decode_noise.h"
#include "base/fs.h"
#include "base/philox.h"
#include "stages/nets/weights.h"
#include <stdlib.h>

static const uint64_t FIRST = (uint64_t)1 << 62; /* the element that begins the block */

static int read_channels(const lg_weights *w, const char *name, int channels, float *ret)
{
    const struct lg_st_entry *e = lg_weights_find(w, name);
    if (!e || e->rank != 1 || e->dim[0] != channels)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: \"%s\" is not a value for each of %d channels",
                       lg_weights_path(w), name, channels);
    return lg_st_read_f32(e, ret, 0, (size_t)channels);
}

static int read_statistics(const struct lg_decode_noise *m, float *mean, float *spread)
{
    char path[LG_PATH_BYTES];
    lg_weights *w = NULL;
    LG_TRY(lg_path(path, "%s/diffusion_pytorch_model.safetensors", m->vae_dir));
    LG_TRY(lg_weights_open(path, &w));
    int rc = read_channels(w, "latents_mean", m->channels, mean);
    if (rc == 0) rc = read_channels(w, "latents_std", m->channels, spread);
    lg_weights_close(&w);
    return rc;
}

int lg_decode_noise_mix(const struct lg_decode_noise *m, float *latents, int n)
{
    const size_t C = (size_t)m->channels, count = C * m->values;
    float *mean = malloc(2 * C * sizeof *mean), *noise = malloc(count * sizeof *noise);
    LG_ASSERT(mean && noise);
    int rc = read_statistics(m, mean, mean + C);
    for (int i = 0; i < n && rc == 0; i++) {
        lg_philox_normal_f32(noise, count, m->seed, LG_PURPOSE_DECODE, (uint64_t)i, FIRST);
        for (size_t e = 0; e < count; e++) {
            float *x = &latents[(size_t)i * count + e];
            const double center = (double)mean[e / m->values],
                         spread = (double)mean[C + e / m->values];
            const double z = (double)*x * spread + center;
            *x = (float)(((1 - m->share) * z + m->share * (double)noise[e] - center) / spread);
        }
    }
    free(mean);
    free(noise);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
