/* ledger_check: does a run's ledger say that every sample was trained exactly once, in order?
 *
 * usage: ledger_check --steps N --batch B [--metrics FILE]
 *                     [--tar FILE --seed S [--buckets TABLE --ranks R --micro M]] LEDGER
 *
 * Written from docs/operations.md ("The ledger") alone: nothing of the project is included or linked,
 * so a mistake in the writer cannot hide in the checker. With --metrics also compares steps and
 * losses of metrics.jsonl. With --tar (the only shard of the data set, plain ustar) computes which
 * samples each step must have had, and their hash (its items are PNGs and WebPs); with --buckets ("buckets" of the run's plan.json) from the sizes
 * of its PNGs, for R ranks and micro-batches of M. Prints one line; exit code 0: all is well, 1: it
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
enum { BUCKETS_MAX = 128, GROUPS_KEY = 65535 };
#define ABSENT UINT64_MAX

struct options {
    const char *ledger, *metrics, *tar, *buckets;
    uint64_t steps, batch, seed, ranks, micro;
};

struct item {
    uint64_t key; /* hash */
    uint64_t width, height, bucket;
};

struct bucket {
    uint64_t height, width, rows, items, groups, first_group;
    uint64_t *item; /* (items) */
    int used;
};

struct data {
    struct item *item;
    uint64_t count, groups; /* of an epoch */
    struct bucket bucket[BUCKETS_MAX];
    int n, n_used;
    uint64_t *trained; /* (count) */
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

/* ---- the permutation ---- */

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

static uint64_t permuted(uint64_t seed, uint64_t epoch, uint64_t x, uint64_t count)
{
    unsigned bits = 2;
    while (1ull << bits < count) bits++;
    unsigned low_bits = bits / 2;
    uint64_t low_mask = (1ull << low_bits) - 1, high_mask = (1ull << (bits - low_bits)) - 1;
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

/* ---- the data set ---- */

static uint64_t be32(const unsigned char *p)
{
    return (uint64_t)p[0] << 24 | (uint64_t)p[1] << 16 | (uint64_t)p[2] << 8 | p[3];
}

/* Keys and sizes of the pictures of a shard, in its order. */
static void read_items(const char *path, struct data *d)
{
    size_t bytes;
    unsigned char *tar = read_all(path, &bytes);
    const char *shard = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    d->item = calloc(ITEMS_MAX, sizeof *d->item);
    if (!d->item) bad("no memory for the keys");
    for (size_t at = 0; at + BLOCK <= bytes && tar[at];) {
        const char *name = (const char *)tar + at, *dot = memchr(name, '.', 100);
        size_t size = strtoull(name + 124, NULL, 8);
        if (dot && (!strncmp(dot, ".png", 4) || !strncmp(dot, ".webp", 5)) &&
            d->count < ITEMS_MAX && at + BLOCK + 24 <= bytes) {
            char key[512];
            int n = snprintf(key, sizeof key, "%s/%.*s", shard, (int)(dot - name), name);
            d->item[d->count++] = (struct item){.key = XXH3_64bits(key, (size_t)n),
                                                .width = be32(tar + at + BLOCK + 16),
                                                .height = be32(tar + at + BLOCK + 20)};
        }
        at += BLOCK + (size + BLOCK - 1) / BLOCK * BLOCK;
    }
    free(tar);
    if (!d->count) bad("%s holds no pictures", path);
    d->trained = calloc(d->count, sizeof *d->trained);
    if (!d->trained) bad("no memory for the counts");
}

/* ---- buckets ---- */

/* The used bucket nearest to a ratio of h to w: the least quotient of the larger by the smaller ratio; of equal ones the
 * largest that h x w covers, else the smallest. */
static int nearest(const struct data *d, uint64_t h, uint64_t w)
{
    int best = -1;
    double least = 0;
    for (int k = 0; k < d->n; k++) {
        const struct bucket *b = &d->bucket[k];
        if (!b->used) continue;
        /* Below 2^53, and quotients of such numbers that differ do so by far more than a double's precision. */
        double x = (double)(b->height * w), y = (double)(h * b->width), q = x > y ? x / y : y / x;
        if (best >= 0 && q == least) {
            const struct bucket *c = &d->bucket[best];
            const int can = h >= b->height && w >= b->width;
            const int could = h >= c->height && w >= c->width;
            const int larger = b->height > c->height;
            if (can != could ? !can : can != larger) continue;
        } else if (best >= 0 && q > least) {
            continue;
        }
        best = k;
        least = q;
    }
    return best;
}

static void read_buckets(const struct options *o, struct data *d)
{
    const char *at = o->buckets;
    for (int used = 0; *at; at += used + (at[used] == ',')) {
        struct bucket *b = &d->bucket[d->n++];
        if (d->n > BUCKETS_MAX || sscanf(at, "%" SCNu64 "x%" SCNu64 "*%" SCNu64 "%n", &b->height,
                                         &b->width, &b->rows, &used) != 3)
            bad("--buckets: %s", at);
        b->used = 1;
    }
    for (uint64_t i = 0; i < d->count; i++) {
        struct item *item = &d->item[i];
        item->bucket = (uint64_t)nearest(d, item->height, item->width);
        d->bucket[item->bucket].items++;
    }
    for (int k = 0; k < d->n; k++) d->n_used += d->bucket[k].used = d->bucket[k].items > 0;
}

/* Buckets that do not fill a group, the smallest first, go to the nearest that is left. */
static void merge_buckets(const struct options *o, struct data *d)
{
    for (; d->n_used > 1; d->n_used--) {
        int least = -1;
        for (int k = 0; k < d->n; k++) {
            const struct bucket *b = &d->bucket[k];
            if (!b->used || b->items >= o->ranks * b->rows) continue;
            if (least < 0 || b->items < d->bucket[least].items) least = k;
        }
        if (least < 0) return;
        struct bucket *from = &d->bucket[least];
        from->used = 0;
        const int to = nearest(d, from->height, from->width);
        d->bucket[to].items += from->items;
        from->items = 0;
        for (uint64_t i = 0; i < d->count; i++)
            if (d->item[i].bucket == (uint64_t)least) d->item[i].bucket = (uint64_t)to;
    }
}

static void make_buckets(const struct options *o, struct data *d)
{
    read_buckets(o, d);
    merge_buckets(o, d);
    for (int k = 0; k < d->n; k++) {
        struct bucket *b = &d->bucket[k];
        const uint64_t holds = o->ranks * b->rows;
        b->first_group = d->groups;
        b->groups = (b->items + holds - 1) / holds;
        d->groups += b->groups;
        b->item = calloc(b->items + 1, sizeof *b->item);
        if (!b->item) bad("no memory for a bucket");
        uint64_t n = 0;
        for (uint64_t i = 0; i < d->count; i++)
            if (d->item[i].bucket == (uint64_t)k) b->item[n++] = i;
    }
}

/* ---- which item sample n is ---- */

static uint64_t item_in_buckets(const struct options *o, const struct data *d, uint64_t n,
                                uint64_t *ret_epoch)
{
    const uint64_t share = o->batch / o->ranks, in_step = n % o->batch;
    const uint64_t rank = in_step / share, row = in_step % share % o->micro;
    const uint64_t p = n / o->batch * (share / o->micro) + in_step % share / o->micro;
    const uint64_t epoch = p / d->groups;
    uint64_t g = p % d->groups;
    int k = 0;
    *ret_epoch = epoch;
    if (d->n_used > 1) g = permuted(o->seed, epoch + ((uint64_t)GROUPS_KEY << 48), g, d->groups);
    while (g >= d->bucket[k].first_group + d->bucket[k].groups) k++;
    const struct bucket *b = &d->bucket[k];
    const uint64_t i = ((g - b->first_group) * o->ranks + rank) * b->rows + row;
    if (row >= b->rows || i >= b->items) return ABSENT;
    const uint64_t key = d->n_used > 1 ? (uint64_t)k << 48 : 0;
    return b->item[permuted(o->seed, epoch + key, i, b->items)];
}

static uint64_t item_of(const struct options *o, const struct data *d, uint64_t n,
                        uint64_t *ret_epoch)
{
    if (d->n) return item_in_buckets(o, d, n, ret_epoch);
    *ret_epoch = n / d->count;
    return permuted(o->seed, *ret_epoch, n % d->count, d->count);
}

static uint64_t expected_keys(const struct options *o, const struct data *d, uint64_t first)
{
    XXH3_state_t *h = XXH3_createState();
    if (!h) bad("no memory for a hash");
    XXH3_64bits_reset(h);
    for (uint64_t n = first; n < first + o->batch; n++) {
        uint64_t epoch, item = item_of(o, d, n, &epoch);
        const uint64_t key = item == ABSENT ? 0 : d->item[item].key;
        XXH3_64bits_update(h, &key, sizeof key);
        if (item == ABSENT) continue;
        if (d->trained[item] != epoch)
            bad("item %" PRIu64 " comes for the %" PRIu64 ". time in epoch %" PRIu64, item,
                d->trained[item] + 1, epoch + 1);
        d->trained[item]++;
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
    static struct data d;
    uint64_t trained = 0, least = UINT64_MAX;
    unsigned char *ledger = read_all(o->ledger, &bytes);
    double *loss = calloc(o->steps, sizeof *loss);
    if (!loss) bad("no memory for %" PRIu64 " steps", o->steps);
    if (bytes != o->steps * RECORD)
        bad("the ledger has %zu bytes, %" PRIu64 " steps need %" PRIu64, bytes, o->steps,
            o->steps * RECORD);
    if (o->tar) read_items(o->tar, &d);
    if (o->tar && o->buckets) make_buckets(o, &d);
    for (uint64_t k = 1; k <= o->steps; k++) {
        const unsigned char *r = ledger + (k - 1) * RECORD;
        loss[k - 1] = check_record(o, r, k, u64(ledger + 48));
        if (o->tar && u64(r + 24) != expected_keys(o, &d, (k - 1) * o->batch))
            bad("step %" PRIu64 " was trained on other samples than the order says", k);
    }
    for (uint64_t i = 0; i < d.count; i++) {
        trained += d.trained[i];
        if (d.trained[i] < least) least = d.trained[i];
    }
    if (o->metrics) check_metrics(o, loss);
    printf("%" PRIu64 " steps, %" PRIu64 " samples, each trained once", o->steps,
           o->tar ? trained : o->steps * o->batch);
    if (o->tar)
        printf("; every item in each of %" PRIu64 " epochs and once at most in the last", least);
    putchar('\n');
    free(ledger);
    free(loss);
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
        else if (value && !strcmp(argv[i], "--buckets"))
            o.buckets = argv[++i];
        else if (value && !strcmp(argv[i], "--ranks"))
            o.ranks = strtoull(argv[++i], NULL, 10);
        else if (value && !strcmp(argv[i], "--micro"))
            o.micro = strtoull(argv[++i], NULL, 10);
        else if (value && !strcmp(argv[i], "--metrics"))
            o.metrics = argv[++i];
        else if (value && !strcmp(argv[i], "--tar"))
            o.tar = argv[++i];
        else
            o.steps = 0, i = argc;
    }
    const int cut = !o.buckets || (o.ranks && o.micro && o.batch % (o.ranks * o.micro) == 0);
    if (!o.ledger || !o.steps || !o.batch || !cut) {
        fprintf(stderr, "usage: ledger_check --steps N --batch B [--metrics FILE] "
                        "[--tar FILE --seed S [--buckets TABLE --ranks R --micro M]] LEDGER\n");
        return 2;
    }
    check(&o);
    return 0;
}
