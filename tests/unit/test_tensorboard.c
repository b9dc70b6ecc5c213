/* TensorBoard's event files: the bytes, read by a reader that shares nothing with the writer (CRC bit by
 * bit, protobuf by its own walk); every step exactly once whatever was cut, torn or killed. */
#include "base/check.h"
#include "base/clock.h"
#include "supervisor/views/tensorboard.h"
#include "supervisor/views/tfevents.h"
#include "tests/unit/scratch.h"
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

/* ---- an independent reader ---- */

static uint32_t slow_crc(const uint8_t *p, size_t n)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < n * 8; i++) {
        uint32_t bit = (crc ^ (uint32_t)(p[i / 8] >> i % 8)) & 1;
        crc = (crc >> 1) ^ (bit ? 0x82f63b78u : 0);
    }
    return crc ^ 0xffffffffu;
}

static uint32_t slow_masked(const uint8_t *p, size_t n)
{
    uint32_t c = slow_crc(p, n);
    return ((c >> 15) | (c << 17)) + 0xa282ead8u;
}

static uint64_t le(const uint8_t *p, int n)
{
    return n ? p[0] | le(p + 1, n - 1) << 8 : 0;
}

enum { TEXT_MAX = 1 << 20 };
static char g_text[TEXT_MAX]; /* what was read, as text: one line a leaf */
static size_t g_at;
static uint64_t g_step;

__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    g_at += (size_t)vsnprintf(g_text + g_at, TEXT_MAX - g_at, fmt, ap);
    va_end(ap);
    assert_true(g_at < TEXT_MAX);
}

static uint64_t varint(const uint8_t **p)
{
    uint64_t v = 0;
    for (int shift = 0;; shift += 7) {
        uint8_t b = *(*p)++;
        v |= (uint64_t)(b & 0x7f) << shift;
        if (!(b & 0x80)) return v;
    }
}

/* Which fields hold messages: Event.summary, Event.session_log, Summary.value, Value.image and
 * Value.histo. */
static bool is_message(const char *path)
{
    return !strcmp(path, ".5") || !strcmp(path, ".7") || !strcmp(path, ".5.1") ||
           !strcmp(path, ".5.1.4") || !strcmp(path, ".5.1.5");
}

/* HistogramProto.bucket_limit and .bucket: packed doubles. */
static void say_doubles(const char *path, const uint8_t *p, uint64_t n)
{
    assert_int_equal(n % 8, 0);
    say("%s=", path);
    for (uint64_t i = 0; i < n; i += 8) {
        double d;
        memcpy(&d, p + i, 8);
        say("%s%g", i ? " " : "", d);
    }
    say("\n");
}

static void walk(const uint8_t *p, const uint8_t *end, const char *path)
{
    while (p < end) {
        char here[64];
        uint64_t key = varint(&p);
        snprintf(here, sizeof here, "%s.%d", path, (int)(key >> 3));
        if ((key & 7) == 0) {
            uint64_t v = varint(&p);
            if (!strcmp(here, ".2")) g_step = v;
            say("%s=%llu\n", here, (unsigned long long)v);
        } else if ((key & 7) == 1) {
            double d;
            memcpy(&d, p, 8);
            say("%s=%.3f\n", here, d);
            p += 8;
        } else if ((key & 7) == 5) {
            float f;
            memcpy(&f, p, 4);
            say("%s=%g\n", here, (double)f);
            p += 4;
        } else {
            assert_int_equal(key & 7, 2);
            uint64_t n = varint(&p);
            assert_true(n <= (uint64_t)(end - p));
            if (is_message(here))
                walk(p, p + n, here);
            else if (!strcmp(here, ".5.1.5.6") || !strcmp(here, ".5.1.5.7"))
                say_doubles(here, p, n);
            else if (n < 64)
                say("%s=%.*s\n", here, (int)n, (const char *)p);
            else
                say("%s=%llu bytes\n", here, (unsigned long long)n);
            p += n;
        }
    }
    assert_ptr_equal(p, end);
}

static int g_records, g_histograms[5000]; /* of each step */

/* Steps of one file are added to steps[] ("s" or "p" counts); asserts that every byte is of a record. */
static void read_events(const char *path, int *scalars, int *pictures)
{
    char *data;
    size_t bytes, at = 0;
    assert_int_equal(lg_read_file(path, 1 << 26, &data, &bytes), 0);
    const uint8_t *p = (const uint8_t *)data;
    for (g_records = 0; at < bytes; g_records++) {
        assert_true(bytes - at >= 16);
        uint64_t n = le(p + at, 8);
        assert_true(n <= bytes - at - 16);
        assert_int_equal(le(p + at + 8, 4), slow_masked(p + at, 8));
        assert_int_equal(le(p + at + 12 + n, 4), slow_masked(p + at + 12, n));
        size_t from = g_at;
        walk(p + at + 12, p + at + 12 + n, "");
        if (strstr(g_text + from, "\n.5.1.1=train/loss\n") && scalars) scalars[g_step]++;
        if (strstr(g_text + from, "\n.5.1.1=samples\n") && pictures) pictures[g_step]++;
        if (strstr(g_text + from, "\n.5.1.1=ema/")) g_histograms[g_step]++;
        at += n + 16;
    }
    free(data);
}

static void assert_text(const char *part)
{
    if (!strstr(g_text, part)) fail_msg("\"%s\" is not in:\n%s", part, g_text);
}

/* ---- tests of the bytes ---- */

static int setup(void **state)
{
    (void)state;
    scratch_make();
    g_at = 0;
    g_text[0] = 0;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    scratch_remove();
    return 0;
}

/* RFC 3720, B.4 and the check value of the catalogue of CRCs. */
static void test_crc(void **state)
{
    (void)state;
    uint8_t zero[32] = {0}, rising[32];
    for (int i = 0; i < 32; i++) rising[i] = (uint8_t)i;
    assert_int_equal(lg_crc32c("123456789", 9), 0xe3069283u);
    assert_int_equal(lg_crc32c(zero, 32), 0x8a9136aau);
    assert_int_equal(lg_crc32c(rising, 32), 0x46dd794eu);
    assert_int_equal(slow_crc(rising, 32), 0x46dd794eu);
}

static void test_bytes(void **state)
{
    (void)state;
    uint8_t data[4096];
    struct lg_tf_buffer b = {.data = data, .cap = sizeof data};
    uint8_t png[100] = {7};
    lg_tf_version(&b, 1.5);
    lg_tf_start(&b, 2.5, 41);
    lg_tf_scalars(&b, 3.5, 300, (struct lg_tf_scalar[]){{"a", 0.25}, {"b", (double)NAN}}, 2);
    lg_tf_picture(&b, 4.5, UINT64_C(5000000000),
                  &(struct lg_tf_image){
                      .tag = "t", .file = png, .bytes = sizeof png, .width = 640, .height = 48});
    assert_false(b.full);
    FILE *f = fopen(scratch_write("e", ""), "w");
    fwrite(data, 1, b.bytes, f);
    fclose(f);
    read_events(scratch_path("e"), NULL, NULL);
    assert_int_equal(g_records, 4);
    assert_string_equal(g_text, ".1=1.500\n.2=0\n.3=brain.Event:2\n"
                                ".1=2.500\n.2=41\n.7.1=1\n"
                                ".1=3.500\n.2=300\n.5.1.1=a\n.5.1.2=0.25\n.5.1.1=b\n.5.1.2=nan\n"
                                ".1=4.500\n.2=5000000000\n.5.1.1=t\n.5.1.4.1=48\n.5.1.4.2=640\n"
                                ".5.1.4.3=3\n.5.1.4.4=100 bytes\n");
    size_t before = b.bytes;
    b.cap = before + 40; /* a record that does not fit leaves nothing */
    lg_tf_scalars(&b, 3.5, 300, (struct lg_tf_scalar[]){{"a", 0.25}, {"b", 1}}, 2);
    assert_true(b.full && b.bytes == before);
}

static void test_histogram_bytes(void **state)
{
    (void)state;
    uint8_t data[4096];
    struct lg_tf_buffer b = {.data = data, .cap = sizeof data};
    struct lg_tf_record r;
    const double limits[] = {-0.5, 0.25, 1e308}, counts[] = {0, 7, 300};
    const struct lg_tf_histogram h[] = {
        {.tag = "ema/x",
         .min = -1.5,
         .max = 2.5,
         .count = 307,
         .sum = 12.25,
         .sum_squares = 90.5,
         .limits = limits,
         .counts = counts,
         .n = 3},
        {.tag = "ema/y", .limits = limits, .counts = counts, .n = 1}};
    lg_tf_histograms(&b, 3.5, 40, h, 2);
    assert_false(b.full);
    assert_true(b.bytes <= 3 * LG_TF_HISTOGRAM_EXTRA + 2 * 5 + 16 * 4);
    assert_true(lg_tf_read(data, b.bytes, &r));
    assert_true(r.kind == LG_TF_HISTOGRAMS && r.step == 40 && r.bytes == b.bytes);
    FILE *f = fopen(scratch_write("e", ""), "w");
    fwrite(data, 1, b.bytes, f);
    fclose(f);
    read_events(scratch_path("e"), NULL, NULL);
    assert_string_equal(g_text, ".1=3.500\n.2=40\n.5.1.1=ema/x\n.5.1.5.1=-1.500\n.5.1.5.2=2.500\n"
                                ".5.1.5.3=307.000\n.5.1.5.4=12.250\n.5.1.5.5=90.500\n"
                                ".5.1.5.6=-0.5 0.25 1e+308\n.5.1.5.7=0 7 300\n"
                                ".5.1.1=ema/y\n.5.1.5.1=0.000\n.5.1.5.2=0.000\n.5.1.5.3=0.000\n"
                                ".5.1.5.4=0.000\n.5.1.5.5=0.000\n.5.1.5.6=-0.5\n.5.1.5.7=0\n");
}

static void test_reading_back(void **state)
{
    (void)state;
    uint8_t data[512];
    struct lg_tf_buffer b = {.data = data, .cap = sizeof data};
    struct lg_tf_record r;
    lg_tf_scalars(&b, 3.5, 300, (struct lg_tf_scalar[]){{"a", 0.25}}, 1);
    size_t n = b.bytes;
    lg_tf_picture(&b, 3.5, 301, &(struct lg_tf_image){.tag = "t", .file = data, .bytes = 9});
    assert_true(lg_tf_read(data, b.bytes, &r));
    assert_true(r.bytes == n && r.kind == LG_TF_SCALARS && r.step == 300);
    assert_true(lg_tf_read(data + n, b.bytes - n, &r));
    assert_true(r.kind == LG_TF_PICTURE && r.step == 301);
    for (size_t cut = 0; cut < n; cut++) assert_false(lg_tf_read(data, cut, &r));
    for (size_t bit = 0; bit < n * 8; bit++) { /* every flipped bit is seen */
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_false(lg_tf_read(data, b.bytes, &r));
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

/* Is this message, in a record whose checksums are right, an event? */
static bool reads(const void *message, size_t bytes, struct lg_tf_record *r)
{
    uint8_t data[256] = {(uint8_t)bytes};
    uint32_t head = slow_masked(data, 8), tail = slow_masked(message, bytes);
    memcpy(data + 8, &head, 4);
    memcpy(data + 12, message, bytes);
    memcpy(data + 12 + bytes, &tail, 4);
    return lg_tf_read(data, bytes + 16, r);
}
#define READS(text) reads(text, sizeof text - 1, &r)

/* Checksums that are right do not make an event: what another program has written is not walked over
 * blindly, what TensorBoard may add is passed over. */
static void test_records_of_others(void **state)
{
    (void)state;
    struct lg_tf_record r;
    assert_true(READS("\x10\x07"));
    assert_true(r.step == 7 && r.kind == LG_TF_OTHER);
    assert_true(READS("\x10\x07\x1a\x01x\x35"
                      "abcd"
                      "\x49"
                      "abcdefgh"));
    assert_true(r.step == 7);
    assert_true(READS("\x10\x07\x2a\x00")); /* a summary of nothing */
    assert_true(r.kind == LG_TF_SCALARS);
    assert_true(READS("\x10\x07\x2a\x02\x10\x01")); /* of something else */
    assert_true(r.kind == LG_TF_SCALARS);
    assert_true(READS("\x10\x07\x2a\x04\x0a\x02\x22\x00")); /* an image */
    assert_true(r.kind == LG_TF_PICTURE);
    assert_false(READS("\x10"));                                             /* cut in a field */
    assert_false(READS("\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")); /* no varint */
    assert_false(READS("\x1a\x05x"));                                        /* longer than it is */
    assert_false(READS("\x1a"));
    assert_false(READS("\x13\x00"));     /* a kind of field that there is not */
    assert_false(READS("\xd0\x7d\x01")); /* number 2010 */
    assert_false(READS("\x49"
                       "abc"));
}

/* ---- tests of a run ---- */

enum { STEPS_MAX = 5000 };
static int g_scalars[STEPS_MAX], g_pictures[STEPS_MAX];

static void append_steps(int from, int to)
{
    if (access(scratch_path("run"), F_OK)) scratch_write("run/metrics.jsonl", "");
    FILE *f = fopen(scratch_path("run/metrics.jsonl"), "a");
    for (int s = from; s <= to; s++)
        fprintf(
            f,
            "{\"step\": %d, \"loss\": %d.5, \"grad_norm\": 2, \"lr\": 0.001, \"samples_per_s\": "
            "%d, \"data_wait_s\": 0.25, \"ckpt_wait_s\": 0.125, \"voids\": 3, \"skipped\": 0, "
            "\"time\": 1000.5}\n",
            s, s, s == 1 ? 0 : 80);
    fclose(f);
}

/* What rank 0 does when it goes back to a state. */
static void cut_steps(int to)
{
    scratch_write("run/metrics.jsonl", "");
    append_steps(1, to);
}

static void write_sample(int step)
{
    char name[64];
    uint8_t png[33] = "\x89PNG\r\n\x1a\n....IHDR\0\0\1\2\0\0\0\7";
    snprintf(name, sizeof name, "run/samples/step%d.png", step);
    FILE *f = fopen(scratch_write(name, ""), "w");
    fwrite(png, 1, sizeof png, f);
    fclose(f);
}

/* An animation of 258 x 7; or only a part of its head. */
static void write_clip(int step, size_t bytes)
{
    char name[64];
    uint8_t gif[33] = "GIF89a\2\1\7\0....";
    snprintf(name, sizeof name, "run/samples/step%d.gif", step);
    FILE *f = fopen(scratch_write(name, ""), "w");
    fwrite(gif, 1, bytes, f);
    fclose(f);
}

static void export_up_to(uint64_t open_at, uint64_t committed)
{
    lg_tensorboard t;
    assert_int_equal(lg_tensorboard_open(scratch_path("run"), open_at, &t), 0);
    lg_tensorboard_flush(&t, committed);
    lg_tensorboard_close(&t);
}

static const char *event_file(int number)
{
    char name[64];
    snprintf(name, sizeof name, "run/tensorboard/events.out.tfevents.%010d.lg", number);
    return scratch_path(name);
}

/* All files together: steps 1 to `last` once each, nothing else. Returns the number of files. */
static int assert_steps(int last)
{
    int n = 0;
    g_at = 0;
    memset(g_scalars, 0, sizeof g_scalars);
    memset(g_pictures, 0, sizeof g_pictures);
    memset(g_histograms, 0, sizeof g_histograms);
    while (access(event_file(n + 1), F_OK) == 0)
        read_events(event_file(++n), g_scalars, g_pictures);
    for (int s = 0; s < STEPS_MAX; s++)
        if (g_scalars[s] != (s >= 1 && s <= last))
            fail_msg("step %d stands there %d times (of %d)", s, g_scalars[s], last);
    return n;
}

/* Of a learned variance both parts; a bound that is not finite as what it is. */
static void test_loss_parts(void **state)
{
    (void)state;
    scratch_write("run/metrics.jsonl", "{\"step\": 1, \"loss\": 2.5, \"loss_mse\": 2, \"loss_vb\": "
                                       "0.5, \"time\": 1000}\n");
    export_up_to(0, 1);
    assert_int_equal(assert_steps(1), 1);
    assert_text(".5.1.1=train/loss\n.5.1.2=2.5\n.5.1.1=train/loss_mse\n.5.1.2=2\n"
                ".5.1.1=train/loss_vb\n.5.1.2=0.5\n.5.1.1=train/grad_norm\n");
}

static void test_steps(void **state)
{
    (void)state;
    append_steps(1, 700);
    export_up_to(0, 650); /* the rest is not committed */
    assert_int_equal(assert_steps(650), 1);
    assert_text(
        ".1=1000.500\n.2=2\n.5.1.1=train/loss\n.5.1.2=2.5\n.5.1.1=train/grad_norm\n.5.1.2=2\n"
        ".5.1.1=train/lr\n.5.1.2=0.001\n.5.1.1=train/skipped\n.5.1.2=0\n"
        ".5.1.1=data/voids\n.5.1.2=3\n.5.1.1=speed/samples_per_s\n.5.1.2=80\n"
        ".5.1.1=speed/data_wait_s\n.5.1.2=0.25\n"
        ".5.1.1=speed/checkpoint_wait_s\n.5.1.2=0.125\n");
    assert_text(".5.1.1=data/voids\n.5.1.2=3\n.5.1.1=speed/data_wait_s"); /* of step 1 */
    export_up_to(650, 700);
    export_up_to(700, 700);
    assert_int_equal(assert_steps(700), 1);
    FILE *f = fopen(scratch_path("run/metrics.jsonl"), "a"); /* the place of a step is not found */
    for (int i = 0; i < 30000; i++) fputs("nonsense\n", f);
    fclose(f);
    append_steps(701, 710);
    export_up_to(700, 705);
    export_up_to(705, 710);
    assert_int_equal(assert_steps(710), 1);
}

/* lgsup dies at any byte of a write. */
static void test_torn_at_every_byte(void **state)
{
    (void)state;
    struct stat st, small;
    append_steps(1, 12);
    export_up_to(0, 10);
    assert_int_equal(stat(event_file(1), &small), 0);
    export_up_to(10, 12);
    assert_int_equal(stat(event_file(1), &st), 0);
    for (off_t cut = small.st_size; cut < st.st_size; cut += 7) {
        assert_int_equal(truncate(event_file(1), cut), 0);
        export_up_to(12, 12);
        assert_steps(12);
        for (int n = 2; access(event_file(n), F_OK) == 0; n++) unlink(event_file(n));
        unlink(event_file(1));
        export_up_to(12, 12);
    }
    assert_steps(12);
}

static void test_back_to_a_checkpoint(void **state)
{
    (void)state;
    append_steps(1, 35);
    write_sample(20);
    write_sample(30);
    export_up_to(0, 35);
    assert_int_equal(assert_steps(35), 1);
    assert_int_equal(g_pictures[20] + g_pictures[30], 2);
    cut_steps(20);
    export_up_to(20, 20);
    assert_int_equal(assert_steps(20), 2);
    assert_text("\n.2=21\n.7.1=1\n"); /* TensorBoard forgets from step 21 on */
    assert_true(g_pictures[20] == 1 && g_pictures[30] == 0);
    append_steps(21, 50);
    export_up_to(20, 50);
    assert_int_equal(assert_steps(50), 2);
    assert_true(g_pictures[20] == 1 && g_pictures[30] == 1);
    cut_steps(10); /* further back than the second file begins */
    export_up_to(10, 10);
    append_steps(11, 60);
    export_up_to(30, 60);
    assert_int_equal(assert_steps(60), 2);
    assert_true(g_pictures[20] == 1 && g_pictures[30] == 1);
}

/* The first file is damaged in its middle, as after a power loss. */
static void test_hole(void **state)
{
    (void)state;
    append_steps(1, 35);
    export_up_to(0, 35);
    cut_steps(20);
    export_up_to(20, 20);
    append_steps(21, 50);
    export_up_to(20, 50);
    FILE *f = fopen(event_file(1), "r+");
    fseek(f, 2000, SEEK_SET);
    fputs("0000", f);
    fclose(f);
    export_up_to(50, 50);
    assert_int_equal(assert_steps(50), 2);
}

static void test_pictures(void **state)
{
    (void)state;
    append_steps(1, 30);
    scratch_write("run/samples/step5.png", "no picture");
    scratch_write("run/samples/step6.png.tmp.77", "not yet one");
    write_sample(10);
    export_up_to(0, 30);
    write_sample(25); /* drawn later */
    export_up_to(30, 30);
    write_sample(31); /* of a former life: not committed */
    export_up_to(30, 30);
    assert_steps(30);
    for (int s = 0; s < STEPS_MAX; s++) assert_int_equal(g_pictures[s], s == 10 || s == 25);
    assert_text("\n.2=10\n.5.1.1=samples\n.5.1.4.1=7\n.5.1.4.2=258\n.5.1.4.3=3\n.5.1.4.4=");
}

static void test_clips(void **state)
{
    (void)state;
    append_steps(1, 30);
    write_clip(10, 33);
    write_clip(15, 9);
    write_sample(20);
    scratch_write("run/samples/step25.webm", "GIF89a no animation");
    export_up_to(0, 30);
    assert_steps(30);
    for (int s = 0; s < STEPS_MAX; s++) assert_int_equal(g_pictures[s], s == 10 || s == 20);
    assert_text("\n.2=10\n.5.1.1=samples\n.5.1.4.1=7\n.5.1.4.2=258\n.5.1.4.3=3\n.5.1.4.4=");
}

static void write_histograms(int step, const char *name)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "run/histograms/step%d.json", step);
    snprintf(text, sizeof text,
             "{\"histograms\": [{\"group\": \"%s\", \"min\": -1, \"max\": 1.5, \"count\": 5, "
             "\"nonfinite\": 0, \"sum\": 2, \"sum_squares\": 3, \"limits\": [0, 1.75], "
             "\"counts\": [2, 3]},\n{\"group\": \"other\", \"min\": 0, \"max\": 0, \"count\": 0, "
             "\"nonfinite\": 9, \"sum\": 0, \"sum_squares\": 0, \"limits\": [1.75], "
             "\"counts\": [0]}]}\n",
             name);
    scratch_write(path, text);
}

static void assert_histograms(int a, int b)
{
    for (int s = 0; s < STEPS_MAX; s++)
        if (g_histograms[s] != (s == a || s == b))
            fail_msg("histograms of step %d stand there %d times", s, g_histograms[s]);
}

static void test_histograms(void **state)
{
    (void)state;
    append_steps(1, 30);
    scratch_write("run/histograms/step5.json", "{\"histograms\": [{\"group\": \"a\"}]}");
    scratch_write("run/histograms/step6.json", "nothing");
    scratch_write("run/histograms/step7.json", "");
    scratch_write("run/histograms/step8.json", "{\"histograms\": []}");
    write_histograms(10, "early");
    write_sample(10);
    export_up_to(0, 30);
    export_up_to(30, 30);
    write_histograms(20, "late");
    write_histograms(31, "of a former life");
    export_up_to(30, 30);
    assert_int_equal(assert_steps(30), 1);
    assert_histograms(10, 20);
    assert_int_equal(g_pictures[10], 1);
    assert_text("\n.2=20\n.5.1.1=ema/late\n.5.1.5.1=-1.000\n.5.1.5.2=1.500\n.5.1.5.3=5.000\n"
                ".5.1.5.4=2.000\n.5.1.5.5=3.000\n.5.1.5.6=0 1.75\n.5.1.5.7=2 3\n"
                ".5.1.1=ema/other\n");
    cut_steps(15); /* the run went back: what stood there of step 20 is void, and comes again */
    export_up_to(15, 15);
    assert_steps(15);
    assert_histograms(10, 10);
    append_steps(16, 30);
    export_up_to(15, 30);
    assert_steps(30);
    assert_histograms(10, 20);
}

static void test_looks(void **state)
{
    (void)state;
    lg_tensorboard t;
    append_steps(1, 1200);
    assert_int_equal(lg_tensorboard_open(scratch_path("run"), 0, &t), 0);
    for (int i = 0; i < 3; i++) assert_int_equal(lg_tensorboard_look(&t, 1200), 0);
    assert_int_equal(assert_steps(1200), 1); /* behind: a piece at every look */
    append_steps(1201, 1210);
    assert_int_equal(lg_tensorboard_look(&t, 1210), 0);
    assert_steps(1200); /* caught up: once a second */
    t.next_ns = 0;
    assert_int_equal(lg_tensorboard_look(&t, 1210), 0);
    assert_steps(1210);
    int fd = t.fd; /* the disk refuses */
    t.fd = -1;
    append_steps(1211, 1220);
    t.next_ns = 0;
    assert_int_equal(lg_tensorboard_look(&t, 1220), 1);
    t.next_ns = 0;
    assert_int_equal(lg_tensorboard_look(&t, 1220), 0); /* said once */
    t.fd = fd;
    t.next_ns = 0;
    assert_int_equal(lg_tensorboard_look(&t, 1220), 0);
    assert_steps(1220);
    lg_tensorboard_close(&t);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crc),
        TEST(test_bytes),
        TEST(test_histogram_bytes),
        TEST(test_reading_back),
        TEST(test_records_of_others),
        TEST(test_steps),
        TEST(test_loss_parts),
        TEST(test_torn_at_every_byte),
        TEST(test_back_to_a_checkpoint),
        TEST(test_hole),
        TEST(test_pictures),
        TEST(test_clips),
        TEST(test_histograms),
        TEST(test_looks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
