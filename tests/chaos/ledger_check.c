/* ledger_check: does a run's ledger say that every sample was trained exactly once, in order?
 *
 * usage: ledger_check --steps N --batch B [--metrics FILE] [--tar FILE --seed S] LEDGER
 *
 * Written from docs/operations.md ("The ledger") alone: nothing of the project is included or linked,
 * so a mistake in the writer cannot hide in the checker. With --metrics also compares steps and
 * losses of metrics.jsonl. With --tar (the only shard of the data set, plain ustar) computes which
 * samples each step must have had, and their hash. Prints one line; exit code 0: all is well, 1: it
 * is not, 2: usage. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { RECORD = 64, BLOCK = 512, ITEMS_MAX = 1 << 20, ROUNDS = 8, PHILOX_ROUNDS = 10 };

struct options {
    const char *ledger, *metrics, *tar;
    uint64_t steps, batch, seed;
};

__attribute__((noreturn, format(printf, 1, 2))) static void bad(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    exit(1);
}

static uint64_t u64(const unsigned char *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

static uint32_t u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static unsigned char *read_all(const char *path, size_t *ret_bytes)
{
    FILE *f = fopen(path, "rb");
    size_t cap = 1 << 16, n = 0;
    unsigned char *data = malloc(cap + 1);
    if (!f || !data) bad("cannot read %s", path);
    for (size_t got; (got = fread(data + n, 1, cap - n, f)) > 0;) {
        n += got;
        if (n < cap) continue;
        cap *= 2;
        data = realloc(data, cap + 1);
        if (!data) bad("no memory for %s", path);
    }
    fclose(f);
    data[n] = 0;
    *ret_bytes = n;
    return data;
}

/* ---- which item sample n is ---- */

static uint32_t philox(uint64_t seed, uint64_t epoch, uint32_t word0, uint32_t word1)
{
    uint32_t c[4] = {word0, word1, (uint32_t)epoch, (uint32_t)(epoch >> 32)};
    uint32_t k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int i = 0; i < PHILOX_ROUNDS; i++) {
        uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b,
                            (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return c[0];
}

static uint64_t item_of(uint64_t seed, uint64_t n, uint64_t count)
{
    unsigned bits = 2;
    while (1ull << bits < count) bits++;
    unsigned low_bits = bits / 2;
    uint64_t low_mask = (1ull << low_bits) - 1, high_mask = (1ull << (bits - low_bits)) - 1;
    uint64_t x = n % count, epoch = n / count;
    do {
        uint64_t low = x & low_mask, high = x >> low_bits;
        for (uint32_t r = 0; r < ROUNDS; r++) {
            if (r % 2 == 0)
                low ^= philox(seed, epoch, (uint32_t)high, r) & low_mask;
            else
                high ^= philox(seed, epoch, (uint32_t)low, r) & high_mask;
        }
        x = high << low_bits | low;
    } while (x >= count);
    return x;
}

/* Hashes of the keys of the pictures of a shard, in its order. */
static uint64_t *read_keys(const char *path, uint64_t *ret_count)
{
    size_t bytes;
    unsigned char *tar = read_all(path, &bytes);
    uint64_t *hash = calloc(ITEMS_MAX, sizeof *hash), count = 0;
    const char *shard = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    if (!hash) bad("no memory for the keys");
    for (size_t at = 0; at + BLOCK <= bytes && tar[at];) {
        const char *name = (const char *)tar + at, *dot = memchr(name, '.', 100);
        size_t size = strtoull(name + 124, NULL, 8);
        if (dot && !strncmp(dot, ".png", 4) && count < ITEMS_MAX) {
            char key[512];
            int n = snprintf(key, sizeof key, "%s/%.*s", shard, (int)(dot - name), name);
            hash[count++] = XXH3_64bits(key, (size_t)n);
        }
        at += BLOCK + (size + BLOCK - 1) / BLOCK * BLOCK;
    }
    free(tar);
    if (!count) bad("%s holds no pictures", path);
    *ret_count = count;
    return hash;
}

static uint64_t expected_keys(const struct options *o, const uint64_t *key, uint64_t count,
                              uint64_t first, uint64_t *trained)
{
    XXH3_state_t *h = XXH3_createState();
    if (!h) bad("no memory for a hash");
    XXH3_64bits_reset(h);
    for (uint64_t n = first; n < first + o->batch; n++) {
        uint64_t item = item_of(o->seed, n, count);
        trained[item]++;
        XXH3_64bits_update(h, &key[item], sizeof key[item]);
    }
    uint64_t digest = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return digest;
}

/* ---- the checks ---- */

/* lineage: of the first record, which every one has to carry. */
static double check_record(const struct options *o, const unsigned char *r, uint64_t k,
                           uint64_t lineage)
{
    double loss;
    uint64_t bits = u64(r + 40);
    memcpy(&loss, &bits, sizeof loss);
    if (u64(r) == 0) bad("step %" PRIu64 " has no record: its samples are lost", k);
    if (u64(r + 56) != XXH3_64bits(r, 56)) bad("the record of step %" PRIu64 " is damaged", k);
    if (u64(r) != k) bad("in the place of step %" PRIu64 " stands step %" PRIu64, k, u64(r));
    if (u64(r + 8) != (k - 1) * o->batch || u64(r + 16) != k * o->batch - 1)
        bad("step %" PRIu64 " says samples %" PRIu64 " to %" PRIu64, k, u64(r + 8), u64(r + 16));
    if (u32(r + 32) || u32(r + 36)) bad("step %" PRIu64 " has voids or was skipped", k);
    if (!lineage || u64(r + 48) != lineage)
        bad("step %" PRIu64 " is of lineage %016" PRIx64 ", the first of %016" PRIx64, k,
            u64(r + 48), lineage);
    return loss;
}

/* Each step stands in metrics.jsonl once, in order, with the loss of the ledger. */
static void check_metrics(const struct options *o, const double *loss)
{
    size_t bytes;
    char *text = (char *)read_all(o->metrics, &bytes), *line = text;
    for (uint64_t k = 1; k <= o->steps; k++) {
        uint64_t step;
        double said;
        char *end = strchr(line, '\n');
        if (!end || sscanf(line, "{\"step\": %" SCNu64 ", \"loss\": %lf", &step, &said) != 2)
            bad("%s: no whole line for step %" PRIu64, o->metrics, k);
        if (step != k) bad("%s: step %" PRIu64 " where %" PRIu64 " belongs", o->metrics, step, k);
        if (!(fabs(said - loss[k - 1]) <= 1e-8 * fabs(said))) /* printed with 9 digits */
            bad("step %" PRIu64 ": loss %.9g in metrics.jsonl, %.9g in the ledger", k, said,
                loss[k - 1]);
        line = end + 1;
    }
    if (*line) bad("%s goes on after step %" PRIu64, o->metrics, o->steps);
    free(text);
}

static void check(const struct options *o)
{
    size_t bytes;
    uint64_t count = 0, *key = NULL, *trained = NULL, least = UINT64_MAX, most = 0;
    unsigned char *ledger = read_all(o->ledger, &bytes);
    double *loss = calloc(o->steps, sizeof *loss);
    if (!loss) bad("no memory for %" PRIu64 " steps", o->steps);
    if (bytes != o->steps * RECORD)
        bad("the ledger has %zu bytes, %" PRIu64 " steps need %" PRIu64, bytes, o->steps,
            o->steps * RECORD);
    if (o->tar) {
        key = read_keys(o->tar, &count);
        trained = calloc(count, sizeof *trained);
        if (!trained) bad("no memory for the counts");
    }
    for (uint64_t k = 1; k <= o->steps; k++) {
        const unsigned char *r = ledger + (k - 1) * RECORD;
        loss[k - 1] = check_record(o, r, k, u64(ledger + 48));
        if (key && u64(r + 24) != expected_keys(o, key, count, (k - 1) * o->batch, trained))
            bad("step %" PRIu64 " was trained on other samples than the order says", k);
    }
    for (uint64_t i = 0; i < count; i++) {
        if (trained[i] < least) least = trained[i];
        if (trained[i] > most) most = trained[i];
    }
    if (key && most - least > 1)
        bad("an item was trained %" PRIu64 " times, another %" PRIu64, most, least);
    if (o->metrics) check_metrics(o, loss);
    printf("%" PRIu64 " steps, %" PRIu64 " samples, each trained once\n", o->steps,
           o->steps * o->batch);
    free(ledger);
    free(loss);
    free(key);
    free(trained);
}

int main(int argc, char **argv)
{
    struct options o = {0};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (argv[i][0] != '-')
            o.ledger = argv[i];
        else if (value && !strcmp(argv[i], "--steps"))
            o.steps = strtoull(argv[++i], NULL, 10);
        else if (value && !strcmp(argv[i], "--batch"))
            o.batch = strtoull(argv[++i], NULL, 10);
        else if (value && !strcmp(argv[i], "--seed"))
            o.seed = strtoull(argv[++i], NULL, 10);
        else if (value && !strcmp(argv[i], "--metrics"))
            o.metrics = argv[++i];
        else if (value && !strcmp(argv[i], "--tar"))
            o.tar = argv[++i];
        else
            o.steps = 0, i = argc;
    }
    if (!o.ledger || !o.steps || !o.batch) {
        fprintf(stderr, "usage: ledger_check --steps N --batch B [--metrics FILE] "
                        "[--tar FILE --seed S] LEDGER\n");
        return 2;
    }
    check(&o);
    return 0;
}
