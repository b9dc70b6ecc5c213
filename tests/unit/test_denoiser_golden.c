/* DiT, PixArt, SD3 and FLUX against diffusers: output and the gradient of every parameter, of nets whose
 * weights are all non-zero, with labels (the null label too), fractional timesteps, masked text,
 * and a latent that is not square. The golden values are fp64; gradients are stored in fp32.
 *
 * Tolerances: ref64 1e-7 (the stored rounding is 6e-8; outputs are stored in fp64, but the
 * positions are fp32 numbers of two libraries' sines), host 1e-5 (fp32, sums of up to a few
 * hundred terms; PyTorch's own fp32 is up to 1.2e-6 from its fp64 with the weights of sd3_plain, and up to 5e-6, of a
 * gradient that is zero but for rounding, with a dozen other sets of weights: make_denoiser.py, sd3_plain_case). The sines of
 * timesteps are fp64 there as well: diffusers' own, of fp32 angles, move SD3's gradients by 1e-5 even where all else is fp64. */
#include "tests/unit/denoiser_fixture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static int check(const struct denoiser_fixture *f, const char *net, const char *what,
                 const void *data, size_t count, double tol)
{
    char name[160];
    snprintf(name, sizeof name, "%s.%s", net, what);
    double *want = golden_read(name, count);
    struct distance d = denoiser_fixture_distance(f, data, want, count);
    free(want);
    /* The gradient of to_k.bias is zero but for rounding (softmax does not see a constant). */
    if (d.diff <= tol * fmax(d.norm, 0.3)) return 0;
    printf("  %s: distance %.3e, norm %.3e\n", name, d.diff, d.norm);
    return 1;
}

static void compare_as(const char *net, const char *device, const struct lg_denoiser_config *c,
                       double tol)
{
    struct denoiser_fixture f;
    size_t size;
    int wrong = 0;
    denoiser_fixture_open(&f, device, NULL, c, true);
    size = lg_dtype_bytes(f.type);
    denoiser_fixture_forward(&f);
    wrong += check(&f, net, "out", f.out.data, (size_t)lg_numel(&f.out), tol);
    denoiser_fixture_backward(&f, false);
    for (int i = 0; i < f.params.trained; i++) {
        const struct lg_param *p = &f.params.p[i];
        char what[140];
        snprintf(what, sizeof what, "grad.%s", p->name);
        wrong += check(&f, net, what, (char *)f.grads + p->offset * size, p->count, tol);
    }
    denoiser_fixture_close(&f);
    assert_int_equal(wrong, 0);
}

static void compare(const char *device, const struct lg_denoiser_config *c, double tol)
{
    compare_as(lg_denoiser_info(c->kind)->name, device, c, tol);
}

/* As SD3-medium: no norms of queries and keys, no second attention. */
static struct lg_denoiser_config plain_sd3(void)
{
    struct lg_denoiser_config c = denoiser_fixture_sd3();
    c.heads = 2, c.hidden = 32, c.depth = 2;
    c.qk_norm = false, c.dual[0] = 0;
    return c;
}

/* Each block's modulations are a product of their own. */
static struct lg_denoiser_config products_apart(void)
{
    struct lg_denoiser_config c = denoiser_fixture_dit();
    c.modulation_weights = 1;
    return c;
}

static void test_ref64(void **state)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), pixart = denoiser_fixture_pixart();
    struct lg_denoiser_config sd3 = denoiser_fixture_sd3(), apart = products_apart();
    compare("ref64", &dit, 1e-7);
    compare("ref64", &apart, 1e-7);
    compare("ref64", &pixart, 1e-7);
    compare("ref64", &sd3, 1e-7);
    struct lg_denoiser_config flux = denoiser_fixture_flux();
    compare("ref64", &flux, 1e-7);
    struct lg_denoiser_config plain = plain_sd3();
    compare_as("sd3_plain", "ref64", &plain, 1e-7);
}

static void test_host(void **state)
{
    struct lg_denoiser_config dit = denoiser_fixture_dit(), pixart = denoiser_fixture_pixart();
    struct lg_denoiser_config sd3 = denoiser_fixture_sd3(), apart = products_apart();
    compare("host", &dit, 1e-5);
    compare("host", &apart, 1e-5);
    compare("host", &pixart, 1e-5);
    compare("host", &sd3, 1e-5);
    struct lg_denoiser_config flux = denoiser_fixture_flux();
    compare("host", &flux, 1e-5);
    struct lg_denoiser_config plain = plain_sd3();
    compare_as("sd3_plain", "host", &plain, 1e-5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ref64), cmocka_unit_test(test_host)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
