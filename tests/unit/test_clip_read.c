/* Clips out of films of every kind: which frames they are; what lies or is cut off is void, in bounded work; a failing
 * disk is not. The arithmetic of choosing alone: test_clip_times. */
#include "base/fs.h"
#include "stages/io/clip_decoder.h"
#include "tests/unit/clip_fixture.h"
#include <libavutil/cpu.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { W = 64, H = 48, FRAMES = 30, RATE = 25, TAKEN_MAX = 64 };

/* Open groups of pictures: behind a key frame pictures from before it are told to be forgotten. */
#define OPEN_GROUPS "crf=4:bf=4:b_strategy=0:b-pyramid=normal:sc_threshold=0:x264-params=open-gop=1"
#define OPEN(container)                                                                            \
    {                                                                                              \
        container, "libx264", OPEN_GROUPS, NULL, W, H, FRAMES, RATE, .key_every = 11               \
    }

static const struct film_spec kinds[] = {
    {"mp4", "libx264", "crf=4:preset=veryfast", NULL, W, H, FRAMES, RATE, .at = NULL},
    {"mov", "libx264", "crf=4:bf=3:x264-params=open-gop=1", NULL, W, H, FRAMES, RATE,
     .key_every = 8, .has_sound = true},
    {"matroska", "libx264", "crf=4:bf=2", "yuv444p", W, H, FRAMES, RATE, .key_every = 6},
    {"mov", "libx265", "crf=4:x265-params=log-level=none", "yuv420p10le", W, H, FRAMES, RATE,
     .key_every = 10},
    {"mp4", "mpeg4", "qmin=1:qmax=2:bf=2", NULL, W, H, FRAMES, RATE, .key_every = 9},
    {"webm", "libvpx", "crf=4:auto-alt-ref=1:lag-in-frames=16", NULL, W, H, FRAMES, RATE,
     .key_every = 11},
    {"webm", "libvpx-vp9", "crf=4:auto-alt-ref=1:lag-in-frames=16", NULL, W, H, FRAMES, RATE,
     .key_every = 11},
    {"matroska", "libaom-av1", "crf=10:cpu-used=8", NULL, W, H, FRAMES, RATE, .key_every = 12},
    {"matroska", "ffv1", NULL, "bgr0", W, H, FRAMES, RATE, .at = NULL},
    {"gif", "gif", NULL, "gray", W, H, FRAMES, RATE, .at = NULL},
    {"webp", "webp", NULL, NULL, W, H, FRAMES, RATE, .at = NULL},
    OPEN("mp4"),
    {"mp4", "libx264", "crf=4:bf=2:slices=3", NULL, W, H, FRAMES, RATE, .key_every = 9},
    {"mp4", "libx264", "crf=4:bf=2", NULL, W, H, FRAMES, RATE, .key_every = 7,
     .muxing = "movflags=frag_keyframe+empty_moov"},
};

/* What came. */
struct taken {
    int n, number[TAKEN_MAX];
    int calls, fail_at; /* fail_at: the call that fails, from 1 */
    lg_picture last;
};

static int take(void *arg, int first, int end, const lg_picture *p)
{
    struct taken *t = arg;
    const struct film_levels levels = film_levels_of(p);
    assert_int_equal(first, t->n);
    assert_true(end > first && end <= TAKEN_MAX);
    if (++t->calls == t->fail_at) return LG_FAIL(LG_ERR_STOP, "enough");
    while (t->n < end) t->number[t->n++] = film_number(levels.left);
    assert_in_range(levels.left + levels.right, 255 - 8, 255 + 8);
    return 0;
}

static int pass(void *arg, int first, int end, const lg_picture *p)
{
    (void)arg, (void)first, (void)end, (void)p;
    return 0;
}

static int read_film(const struct film *f, const struct lg_clip_choice *c, struct taken *ret,
                     struct lg_clip_info *ret_info)
{
    struct lg_clip_memory m = {f->data, f->bytes};
    const struct lg_clip_input in = lg_clip_memory(&m);
    *ret = (struct taken){0};
    return lg_clip_read(&in, c, take, ret, ret_info);
}

#define READ(f, c, t, info)                                                                        \
    do {                                                                                           \
        if (read_film(f, c, t, info) < 0) fail_msg("%s", lg_err_text());                           \
    } while (0)

static void test_kinds(void **state)
{
    (void)state;
    for (size_t k = 0; k < LG_ARRAY_LEN(kinds); k++) {
        struct film f = film_make(&kinds[k]);
        struct lg_clip_memory m = {f.data, f.bytes};
        const struct lg_clip_input in = lg_clip_memory(&m);
        struct lg_clip_info info, seen;
        struct taken t;
        assert_true(lg_clip_is(f.data, f.bytes));
        if (lg_clip_look(&in, &info) < 0) fail_msg("%s: %s", kinds[k].encoder, lg_err_text());
        assert_int_equal(info.width, W);
        assert_int_equal(info.height, H);
        assert_int_equal(info.frames, FRAMES);
        assert_in_range(info.duration_ms, 1000 * FRAMES / RATE - 1, 1000 * FRAMES / RATE);
        for (int start = 0; start <= FRAMES - 8; start++) {
            const struct lg_clip_choice c = {.frames = 8, .start = (start + 0.5) / (FRAMES - 7)};
            READ(&f, &c, &t, &seen);
            assert_memory_equal(&info, &seen, sizeof info);
            assert_int_equal(t.n, 8);
            for (int i = 0; i < 8; i++)
                if (t.number[i] != start + i)
                    fail_msg("%s in %s: frame %d of the clip at %d is %d", kinds[k].encoder,
                             kinds[k].container, i, start, t.number[i]);
        }
        film_free(&f);
    }
}

#define X265 "crf=4:x265-params=log-level=none\\:scenecut=0"

/* What refers to what was cut off is not there; a leading picture that does not is (the last but one, where its time is said). */
static void test_cut_in_open_group(void **state)
{
    (void)state;
    static const struct {
        const char *container, *encoder, *options, *muxing;
        int key_every, first;
    } cut[] = {{"matroska", "libx264", OPEN_GROUPS, NULL, 11, 11},
               {"mp4", "libx264", OPEN_GROUPS, NULL, 11, 11},
               {"mp4", "libx264", OPEN_GROUPS, "use_editlist=0", 11, 11},
               {"matroska", "libx265", X265, NULL, 8, 8},
               {"mp4", "libx265", X265, "use_editlist=0", 8, 8},
               {"mp4", "libx265", X265 "\\:open-gop=0\\:keyint=8\\:min-keyint=8\\:radl=2",
                "use_editlist=0", 8, 6},
               {"matroska", "mpeg4", "qmin=1:qmax=2:bf=2:sc_threshold=1000000000", NULL, 8, 9}};
    for (size_t k = 0; k < LG_ARRAY_LEN(cut); k++) {
        const struct film_spec spec = {cut[k].container,
                                       cut[k].encoder,
                                       cut[k].options,
                                       NULL,
                                       W,
                                       H,
                                       FRAMES,
                                       RATE,
                                       .key_every = cut[k].key_every,
                                       .muxing = cut[k].muxing,
                                       .is_cut = true};
        struct film f = film_make(&spec);
        struct lg_clip_info info;
        struct taken t;
        READ(&f, (&(struct lg_clip_choice){.frames = 1}), &t, &info);
        const int first = t.number[0], left = FRAMES - first;
        assert_int_equal(first, cut[k].first);
        assert_int_equal(info.frames, left);
        for (int start = 0; start <= left - 4; start++) {
            const struct lg_clip_choice c = {.frames = 4, .start = (start + 0.5) / (left - 3)};
            READ(&f, &c, &t, &info);
            for (int i = 0; i < 4; i++) assert_int_equal(t.number[i], first + start + i);
        }
        film_free(&f);
    }
}

static void test_rates(void **state)
{
    (void)state;
    struct film f = film_make(&kinds[1]);
    struct lg_clip_info info;
    struct taken t;
    READ(&f, (&(struct lg_clip_choice){.frames = 5, .rate = {.stride = 6}, .start = 0.99}), &t,
         &info);
    for (int i = 0; i < 5; i++) assert_int_equal(t.number[i], 5 + 6 * i);
    READ(&f, (&(struct lg_clip_choice){.frames = 6, .rate = {.fps = 5}}), &t, &info);
    for (int i = 0; i < 6; i++) assert_int_equal(t.number[i], 5 * i);
    READ(&f, (&(struct lg_clip_choice){.frames = 60, .rate = {.fps = 50}}), &t, &info);
    assert_int_equal(t.calls, FRAMES); /* each is brought once, for both */
    for (int i = 0; i < 60; i++) assert_int_equal(t.number[i], i / 2);
    assert_int_equal(
        read_film(&f, &(struct lg_clip_choice){.frames = 61, .rate = {.fps = 50}}, &t, &info),
        LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "too short: 30 frames in 1.200 s make 60 of the 61"));
    assert_int_equal(read_film(&f, &(struct lg_clip_choice){.frames = 31}, &t, &info), LG_ERR_VOID);
    film_free(&f);
    /* Uneven times: what stands for long comes again. */
    static const int at[] = {0, 1, 2, 10, 11, 12, 13, 14, 15, 16};
    struct film_spec s = kinds[1];
    s.frames = LG_ARRAY_LEN(at), s.at = at, s.has_sound = false;
    f = film_make(&s);
    READ(&f, (&(struct lg_clip_choice){.frames = 9, .rate = {.fps = 12.5}}), &t, &info);
    static const int want[] = {0, 2, 2, 2, 2, 3, 5, 7, 9};
    for (int i = 0; i < 9; i++) assert_int_equal(t.number[i], want[i]);
    film_free(&f);
}

static void test_caller_fails(void **state)
{
    (void)state;
    struct film f = film_make(&kinds[0]);
    struct lg_clip_memory m = {f.data, f.bytes};
    const struct lg_clip_input in = lg_clip_memory(&m);
    struct taken t = {.fail_at = 2};
    struct lg_clip_info info;
    assert_int_equal(lg_clip_read(&in, &(struct lg_clip_choice){.frames = 4}, take, &t, &info),
                     LG_ERR_STOP);
    assert_int_equal(t.calls, 2);
    film_free(&f);
}

/* A disk that fails after so many bytes. */
struct bad_disk {
    const struct film *film;
    int64_t left;
};

static int read_bad(void *arg, uint64_t at, void *dst, size_t bytes)
{
    struct bad_disk *b = arg;
    assert_true(at <= b->film->bytes && bytes <= b->film->bytes - at);
    b->left -= (int64_t)bytes;
    if (b->left < 0) return LG_FAIL(LG_ERR_IO, "the disk is broken");
    memcpy(dst, b->film->data + at, bytes);
    return 0;
}

/* It never makes a sample void: the protocol's rule 6. */
static void test_disk_fails(void **state)
{
    (void)state;
    static const size_t some[] = {0, 2, 4, 5, 9, 10};
    for (size_t k = 0; k < LG_ARRAY_LEN(some); k++) {
        struct film f = film_make(&kinds[some[k]]);
        int well = 0;
        for (int64_t left = 0; left < 6 * (int64_t)f.bytes; left += 1 + (int64_t)f.bytes / 7) {
            struct bad_disk b = {&f, left};
            const struct lg_clip_input in = {.read = read_bad, .arg = &b, .bytes = f.bytes};
            struct taken t = {0};
            struct lg_clip_info info;
            int rc = lg_clip_read(&in, &(struct lg_clip_choice){.frames = 4, .start = 0.6}, take,
                                  &t, &info);
            if (rc != 0 && rc != LG_ERR_IO)
                fail_msg("%s: %s", kinds[some[k]].encoder, lg_err_text());
            well += rc == 0;
            if (rc) assert_non_null(strstr(lg_err_message(), "the disk is broken"));
            lg_err_clear();
        }
        assert_true(well > 0);
        film_free(&f);
    }
}

/* A file that is cut gives its frames or is void, by what is left alone. */
static void test_cut_off(void **state)
{
    (void)state;
    for (size_t k = 0; k < LG_ARRAY_LEN(kinds); k++) {
        struct film f = film_make(&kinds[k]);
        const size_t whole = f.bytes;
        int voids = 0;
        for (size_t cut = 0; cut < whole; cut += 1 + whole / 23) {
            struct lg_clip_info info;
            struct taken t;
            f.bytes = cut;
            uint8_t *exact =
                malloc(LG_MAX(cut, (size_t)1)); /* a sanitizer sees what is read behind it */
            memcpy(exact, f.data, cut);
            const struct film part = {exact, cut};
            int rc = read_film(&part, &(struct lg_clip_choice){.frames = 8}, &t, &info);
            if (rc != 0 && rc != LG_ERR_VOID) fail_msg("%s: %s", kinds[k].encoder, lg_err_text());
            for (int i = 0; rc == 0 && i < 8; i++) assert_int_equal(t.number[i], i);
            voids += rc != 0;
            lg_err_clear();
            free(exact);
        }
        assert_true(voids >= 5);
        film_free(&f);
    }
}

/* ---- lies ---- */

/* The content of the last box of this type; a film's moov stands at its end. */
static uint8_t *find_box(struct film *f, const char *type)
{
    for (size_t i = f->bytes - 8; i > 4; i--)
        if (!memcmp(f->data + i, type, 4)) return f->data + i + 4;
    fail_msg("no box %s", type);
    return NULL;
}

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void put32(uint8_t *at, uint32_t v)
{
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(v >> (24 - 8 * i));
}

#define expect_void(f, why) expect_void_at(f, why, __LINE__)
static void expect_void_at(const struct film *f, const char *why, int line)
{
    struct lg_clip_info info;
    struct taken t;
    int rc = read_film(f, &(struct lg_clip_choice){.frames = 8}, &t, &info);
    if (rc != LG_ERR_VOID || !strstr(lg_err_message(), why))
        fail_msg("line %d: expected \"%s\", got %d: %s", line, why, rc, lg_err_text());
    lg_err_clear();
}

static void expect_frames(const struct film *f)
{
    struct lg_clip_info info;
    struct taken t;
    READ(f, (&(struct lg_clip_choice){.frames = 8}), &t, &info);
    for (int i = 0; i < 8; i++) assert_int_equal(t.number[i], i);
    assert_int_equal(info.frames, FRAMES);
    assert_int_equal(info.duration_ms, 1000 * FRAMES / RATE);
}

#define LIE(spec, ...)                                                                             \
    do {                                                                                           \
        struct film f = film_make(spec);                                                           \
        __VA_ARGS__                                                                                \
        film_free(&f);                                                                             \
    } while (0)

static void test_lying_containers(void **state)
{
    (void)state;
    const struct film_spec *mp4 = &kinds[4], *h264 = &kinds[0];
    /* Length: what a header says of it is not looked at. */
    LIE(mp4, put32(find_box(&f, "mvhd") + 16, 36000000); put32(find_box(&f, "mdhd") + 16, 1);
        expect_frames(&f););
    /* Number of samples: more than are there, and more than fit into any memory. */
    LIE(mp4, put32(find_box(&f, "stsz") + 8, 31); expect_frames(&f););
    LIE(mp4, put32(find_box(&f, "stsz") + 8, 33); put32(find_box(&f, "stsc") + 12, 33);
        put32(find_box(&f, "stts") + 8, 33); expect_void(&f, ""););
    LIE(mp4, uint8_t *stsz = find_box(&f, "stsz"); put32(stsz + 4, 100);
        put32(stsz + 8, UINT32_MAX); expect_void(&f, ""););
    LIE(mp4, put32(find_box(&f, "stts") + 8, UINT32_MAX); expect_frames(&f););
    /* Rate: all at one time, hours for each (which the edit list cuts to one frame), thousands in a second. */
    LIE(h264, put32(find_box(&f, "stts") + 12, 0); expect_void(&f, ""););
    LIE(h264, put32(find_box(&f, "mdhd") + 12, 1); expect_void(&f, ""););
    LIE(h264, put32(find_box(&f, "mdhd") + 12, 1280000);
        expect_void(&f, "a film has 1 to 1000 frames a second"););
    /* Size: of the sample entry, 16k x 16k and another than the frames have. */
    LIE(h264, put32(find_box(&f, "avc1") + 24, 16384u << 16 | 16384);
        expect_void(&f, "the bounds are"););
    LIE(h264, put32(find_box(&f, "avc1") + 24, 32u << 16 | 32);
        expect_void(&f, "has a frame of 64 x 48, its container says 32 x 32"););
}

/* Numbers of H.264 (ITU-T H.264, 9.1): as many zeros as the number has bits behind its first. */
static int bit_at(const uint8_t *p, size_t bit)
{
    return p[bit / 8] >> (7 - bit % 8) & 1;
}

static size_t skip_numbers(const uint8_t *p, size_t bit, int n)
{
    for (int zeros; n; n--, bit += 1 + (size_t)zeros)
        for (zeros = 0; !bit_at(p, bit); bit++) zeros++;
    return bit;
}

/* Of the main profile's sequence parameter set (7.3.2.1.1) all is left out that a decoder can do without, and with it how many frames wait for
 * others, which many cameras do not say. */
static void forget_vui(struct film *f)
{
    uint8_t *avcc = f->data;
    while (memcmp(avcc, "\x01\x4d", 2) != 0 || memcmp(avcc + 4, "\xff\xe1", 2) != 0) avcc++;
    const size_t bytes = (size_t)(avcc[6] << 8 | avcc[7]);
    uint8_t *set = avcc + 9; /* behind the type of the unit: profile, level */
    size_t bit = skip_numbers(set, 24, 5) +
                 1; /* id, frame numbers, kind and numbers of order, references; gaps */
    bit = skip_numbers(set, bit, 2) + 3; /* width, height; whole frames, direct, not cropped */
    assert_int_equal(bit_at(set, bit), 1);
    for (size_t i = bit; i < 8 * (bytes - 1); i++) {
        const int v = i == bit + 1; /* the unit's end */
        set[i / 8] = (uint8_t)((set[i / 8] & ~(0x80 >> i % 8)) | v << (7 - i % 8));
    }
}

static void test_order_unsaid(void **state)
{
    (void)state;
    static const struct {
        const char *container, *muxing;
    } in[] = {{"matroska", NULL}, {"mp4", "movflags=frag_keyframe+empty_moov"}};
    for (size_t k = 0; k < LG_ARRAY_LEN(in); k++) {
        const struct film_spec spec = {in[k].container,
                                       "libx264",
                                       "crf=4:bf=4:b_strategy=0:b-pyramid=normal:profile=main",
                                       NULL,
                                       W,
                                       H,
                                       FRAMES,
                                       RATE,
                                       .key_every = 11,
                                       .muxing = in[k].muxing};
        struct film f = film_make(&spec);
        forget_vui(&f);
        for (int start = 0; start <= FRAMES - 4; start++) {
            const struct lg_clip_choice c = {.frames = 4, .start = (start + 0.5) / (FRAMES - 3)};
            struct lg_clip_info info;
            struct taken t;
            READ(&f, &c, &t, &info);
            for (int i = 0; i < 4; i++) assert_int_equal(t.number[i], start + i);
        }
        film_free(&f);
    }
}

/* The only frame that is asked for. */
static int take_picture(void *arg, int first, int end, const lg_picture *p)
{
    lg_picture *to = arg;
    assert_true(first == 0 && end == 1);
    assert_int_equal(lg_picture_reserve(to, p->width, p->height), 0);
    memcpy(to->rgb, p->rgb, 3 * (size_t)p->width * (size_t)p->height);
    return 0;
}

/* What the matrix of a track, (a b; c d), makes of a stored point: (a x + c y, b x + d y), moved into the picture. */
static void check_turned(struct film *f, const lg_picture *stored, const int m[4])
{
    struct lg_clip_memory memory = {f->data, f->bytes};
    const struct lg_clip_input in = lg_clip_memory(&memory);
    const struct lg_clip_choice c = {.frames = 1, .start = 0.5};
    struct lg_clip_info info, seen;
    lg_picture p = {0};
    static const int at[4] = {0, 1, 3, 4};
    for (int i = 0; i < 4; i++)
        put32(find_box(f, "tkhd") + 40 + 4 * at[i], (uint32_t)(m[i] * 65536));
    assert_int_equal(lg_clip_look(&in, &info), 0);
    assert_int_equal(lg_clip_read(&in, &c, take_picture, &p, &seen), 0);
    assert_memory_equal(&info, &seen, sizeof info);
    assert_int_equal(info.width, m[0] ? W : H);
    assert_int_equal(info.height, m[0] ? H : W);
    assert_int_equal(p.width, info.width);
    assert_int_equal(p.height, info.height);
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++) {
            const int to_x = m[0] * x + m[2] * y + (m[0] + m[2] < 0 ? p.width - 1 : 0);
            const int to_y = m[1] * x + m[3] * y + (m[1] + m[3] < 0 ? p.height - 1 : 0);
            assert_memory_equal(p.rgb + 3 * (to_y * p.width + to_x), stored->rgb + 3 * (y * W + x),
                                3);
        }
    lg_picture_free(&p);
}

static void test_turned(void **state)
{
    (void)state;
    static const int matrices[][4] = {{1, 0, 0, 1}, {-1, 0, 0, 1}, {-1, 0, 0, -1}, {1, 0, 0, -1},
                                      {0, 1, 1, 0}, {0, 1, -1, 0}, {0, -1, -1, 0}, {0, -1, 1, 0}};
    struct film_spec spec = kinds[0];
    spec.black_rows = 10;
    struct film f = film_make(&spec);
    struct lg_clip_memory m = {f.data, f.bytes};
    const struct lg_clip_input in = lg_clip_memory(&m);
    struct lg_clip_info info;
    lg_picture stored = {0};
    assert_int_equal(lg_clip_read(&in, &(struct lg_clip_choice){.frames = 1, .start = 0.5},
                                  take_picture, &stored, &info),
                     0);
    assert_true(stored.rgb[0] < 8 && stored.rgb[3 * W * (H - 1)] > 100);
    for (size_t i = 0; i < LG_ARRAY_LEN(matrices); i++) check_turned(&f, &stored, matrices[i]);
    put32(find_box(&f, "tkhd") + 40, 65536);
    expect_void(&f, "an angle that is no quarter turn");
    lg_picture_free(&stored);
    film_free(&f);
}

/* The frames' own header says 8200 x 8200, the container the truth; a GIF and a WebP say 16k x 16k. */
static void test_large_frames(void **state)
{
    (void)state;
    struct film f = film_make(&kinds[5]);
    int found = 0;
    for (size_t i = 0; i + 7 < f.bytes; i++)
        if (!memcmp(f.data + i, "\x9d\x01\x2a", 3)) {      /* a key frame of VP8 */
            memcpy(f.data + i + 3, "\x08\x20\x08\x20", 4); /* 8200 x 8200 */
            found++;
        }
    assert_true(found > 0);
    expect_void(&f, "too large");
    film_free(&f);
    f = film_make(&kinds[9]);
    memcpy(f.data + 6, "\x00\x40\x00\x40", 4); /* a GIF's screen */
    expect_void(&f, "16384 x 16384 pixels; the bounds are");
    film_free(&f);
    f = film_make(&kinds[10]);
    memcpy(f.data + 24, "\xff\x3f\x00\xff\x3f\x00", 6); /* a WebP's canvas */
    expect_void(&f, "16384 x 16384 pixels; the bounds are");
    film_free(&f);
}

/* A frame of VP8 that is there to be referred to: none of those that are counted. */
static void test_hidden_frame(void **state)
{
    (void)state;
    struct film f = film_make(&kinds[5]);
    int keys = 0, hidden = 0;
    for (size_t i = 3; i + 7 < f.bytes; i++)
        if (!memcmp(f.data + i, "\x9d\x01\x2a", 3) && ++keys == 3) {
            f.data[i - 3] &= (uint8_t)~0x10; /* show_frame */
            hidden++;
        }
    assert_int_equal(hidden, 1);
    struct lg_clip_info info;
    struct taken t;
    READ(&f, (&(struct lg_clip_choice){.frames = FRAMES - 1}), &t, &info);
    assert_int_equal(info.frames, FRAMES - 1);
    for (int i = 0, n = 0; i < FRAMES; i++) hidden += n < t.n && t.number[n] == i ? (n++, 0) : 1;
    assert_int_equal(hidden, 2); /* one of the numbers, and itself */
    film_free(&f);
}

/* Ten hours at one frame a second, and one key frame: what is near it is there, what is far is too much work. */
static void test_ten_hours(void **state)
{
    (void)state;
    static const struct film_spec spec = {"mp4", "mpeg4",         NULL, NULL, 16, 16, 36000,
                                          1,     .key_every = 600};
    struct film f = film_make(&spec);
    struct lg_clip_info info;
    struct taken t;
    READ(&f, (&(struct lg_clip_choice){.frames = 8}), &t, &info);
    assert_int_equal(info.frames, 36000);
    assert_int_equal(info.duration_ms, 36000000);
    READ(&f, (&(struct lg_clip_choice){.frames = 8, .start = 0.999}), &t, &info);
    uint8_t *stss = find_box(&f, "stss"); /* the list of key frames: now the first alone */
    put32(stss + 4, 1);
    READ(&f, (&(struct lg_clip_choice){.frames = 8, .start = 0.4}), &t, &info);
    assert_int_equal(read_film(&f, &(struct lg_clip_choice){.frames = 8, .start = 0.5}, &t, &info),
                     LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "too much work: 18004 frames of 16 x 16"));
    film_free(&f);
}

/* moov in front, as files for the network have it. */
static void put_moov_first(struct film *f)
{
    uint8_t *moov = find_box(f, "moov") - 8;
    const size_t at = (size_t)(moov - f->data), n = f->bytes - at;
    uint8_t *stco = find_box(f, "stco") + 4, *first = f->data + 4;
    const uint32_t entries = get32(stco);
    size_t head = 0; /* ftyp and what stands before mdat */
    while (memcmp(first, "mdat", 4) != 0) head += get32(f->data + head), first = f->data + head + 4;
    for (uint32_t i = 1; i <= entries; i++) put32(stco + 4 * i, get32(stco + 4 * i) + (uint32_t)n);
    uint8_t *all = malloc(f->bytes);
    memcpy(all, f->data, head);
    memcpy(all + head, moov, n);
    memcpy(all + head + n, f->data + head, at - head);
    free(f->data);
    f->data = all;
}

/* The list of frames is whole, the last of them is not. */
static void test_last_frame_cut(void **state)
{
    (void)state;
    struct film f = film_make(&kinds[4]);
    put_moov_first(&f);
    expect_frames(&f);
    f.bytes -= 2;
    expect_void(&f, "cut off or damaged in packet 29");
    film_free(&f);
}

/* One bit of a film is wrong: what the decoder can see of it makes the clip void (measured: 68 of 98 bits, 44 of 97, 73 of 98; 19 of
 * the first 98 when the decoder paints over what it sees). */
static void test_wrong_bits(void **state)
{
    (void)state;
    static const size_t some[] = {4, 2, 12};
    for (size_t k = 0; k < LG_ARRAY_LEN(some); k++) {
        struct film f = film_make(&kinds[some[k]]);
        struct lg_clip_memory m = {f.data, f.bytes};
        const struct lg_clip_input in = lg_clip_memory(&m);
        int voids = 0, all = 0;
        for (size_t at = 60; at < f.bytes; at += 1 + f.bytes / 100, all++) {
            struct lg_clip_info info;
            f.data[at] ^= 0x10;
            int rc =
                lg_clip_read(&in, &(struct lg_clip_choice){.frames = FRAMES}, pass, NULL, &info);
            assert_true(rc == 0 || rc == LG_ERR_VOID);
            voids += rc < 0;
            lg_err_clear();
            f.data[at] ^= 0x10;
        }
        assert_in_range(voids, all * 2 / 5, all);
        film_free(&f);
    }
}

/* A list of samples that lie in turn at the beginning and at the end: each is far from the one before, and the file is read again for
 * each. Bounded by the bytes that are read. */
struct counted {
    struct lg_clip_input in;
    uint64_t bytes;
};

static int read_counted(void *arg, uint64_t at, void *dst, size_t bytes)
{
    struct counted *c = arg;
    c->bytes += bytes;
    return c->in.read(c->in.arg, at, dst, bytes);
}

static void test_reads_in_circles(void **state)
{
    (void)state;
    static const struct film_spec spec = {
        "mov", "mpeg4", NULL, NULL, 16, 16, 4000, 10, .key_every = 600, .has_sound = true};
    struct film f = film_make(&spec);
    uint8_t *moov = find_box(&f, "moov"),
            *stco = moov; /* of the film, which comes before the sound */
    while (memcmp(stco, "stco", 4) != 0) stco++;
    const uint32_t entries = get32(stco + 8), last = get32(stco + 8 + 4 * entries);
    assert_true(entries > 3000);
    for (uint32_t i = 2; i <= entries; i += 2) put32(stco + 8 + 4 * i, last);
    struct lg_clip_memory m = {f.data, f.bytes};
    struct counted c = {.in = lg_clip_memory(&m)};
    const struct lg_clip_input in = {.read = read_counted, .arg = &c, .bytes = f.bytes};
    struct lg_clip_info info;
    assert_int_equal(lg_clip_look(&in, &info), LG_ERR_VOID);
    if (!strstr(lg_err_message(), "reads it again and again")) fail_msg("%s", lg_err_text());
    assert_true(c.bytes <= 16 * f.bytes + (64 << 20) + (1 << 20));
    film_free(&f);
}

/* In the middle of a group of pictures bytes are gone: void where they are needed, read where they are not. */
static void test_damaged_group(void **state)
{
    (void)state;
    struct film_spec spec = kinds[0];
    spec.key_every = 15;
    spec.options = "crf=1:bf=0:refs=1:x264-params=scenecut=0";
    struct film f = film_make(&spec);
    uint8_t *stsz = find_box(&f, "stsz"), *stco = find_box(&f, "stco");
    uint32_t at = (uint32_t)(stco[8] << 24 | stco[9] << 16 | stco[10] << 8 | stco[11]);
    for (int i = 0; i < 20; i++) /* the first half's frames and the second's first */
        at += (uint32_t)(stsz[12 + 4 * i + 2] << 8 | stsz[12 + 4 * i + 3]);
    memset(f.data + at, 0, 8); /* frame 20 */
    struct lg_clip_info info;
    struct taken t;
    READ(&f, (&(struct lg_clip_choice){.frames = 15}), &t, &info);
    READ(&f, (&(struct lg_clip_choice){.frames = 5, .start = 15.5 / 26}), &t, &info);
    for (int i = 0; i < 5; i++) assert_int_equal(t.number[i], 15 + i);
    assert_int_equal(
        read_film(&f, &(struct lg_clip_choice){.frames = 3, .start = 24.5 / 28}, &t, &info),
        LG_ERR_VOID);
    film_free(&f);
}

static void test_other_files(void **state)
{
    (void)state;
    static const char *const others[] = {"", "GIF88a", "RIFF....AVI LIST", "\x89PNG\r\n\x1a\n",
                                         "ftyp"};
    for (size_t i = 0; i < LG_ARRAY_LEN(others); i++) {
        struct film f = {(uint8_t *)others[i], strlen(others[i])};
        assert_false(lg_clip_is(f.data, f.bytes));
        expect_void(&f, "none of MP4");
    }
    static const struct film_spec snow = {"matroska", "mjpeg", NULL, "yuvj420p", W,
                                          H,          3,       RATE, .at = NULL};
    struct film f = film_make(&snow);
    expect_void(&f, "coded as mjpeg");
    film_free(&f);
    struct bad_disk b = {0};
    const struct lg_clip_input large = {
        .read = read_bad, .arg = &b, .bytes = (uint64_t)LG_CLIP_READ_BYTES_MAX + 1};
    struct lg_clip_info info;
    assert_int_equal(lg_clip_look(&large, &info), LG_ERR_VOID);
}

/* ---- bits ---- */

struct all_bits {
    uint8_t *data;
    size_t bytes, capacity;
};

static int keep(void *arg, int first, int end, const lg_picture *p)
{
    struct all_bits *a = arg;
    const size_t n = 3 * (size_t)p->width * (size_t)p->height;
    assert_true(a->bytes + n <= a->capacity && end == first + 1);
    memcpy(a->data + a->bytes, p->rgb, n);
    a->bytes += n;
    return 0;
}

/* No SIMD code gives other bits than the plain code. */
static void test_instruction_sets(void **state)
{
    (void)state;
    enum { SETS = 3 };
    const int flags[SETS] = {
        av_get_cpu_flags(),
        AV_CPU_FLAG_MMX | AV_CPU_FLAG_MMXEXT | AV_CPU_FLAG_SSE | AV_CPU_FLAG_SSE2, 0};
    for (size_t k = 0; k < LG_ARRAY_LEN(kinds); k++) {
        struct film_spec s = kinds[k];
        s.width = 70, s.height = 50;
        struct film f = film_make(&s);
        struct lg_clip_memory m = {f.data, f.bytes};
        const struct lg_clip_input in = lg_clip_memory(&m);
        struct all_bits a[SETS];
        for (int i = 0; i < SETS; i++) {
            const size_t room = (size_t)FRAMES * 3 * 70 * 50;
            struct lg_clip_info info;
            a[i] = (struct all_bits){malloc(room), 0, room};
            av_force_cpu_flags(flags[i]);
            int rc =
                lg_clip_read(&in, &(struct lg_clip_choice){.frames = FRAMES}, keep, &a[i], &info);
            av_force_cpu_flags(flags[0]);
            if (rc < 0) fail_msg("%s", lg_err_text());
            assert_int_equal(a[i].bytes, room);
            assert_memory_equal(a[0].data, a[i].data, room);
        }
        for (int i = 0; i < SETS; i++) free(a[i].data);
        film_free(&f);
    }
}

/* LG_REGENERATE=1: a small film of each kind as a seed for the fuzzer. */
static int write_seeds(void)
{
    for (size_t k = 0; k < LG_ARRAY_LEN(kinds); k++) {
        struct film_spec s = kinds[k];
        char path[LG_PATH_BYTES];
        s.width = s.height = 16, s.frames = 6, s.key_every = 3;
        struct film f = film_make(&s);
        if (lg_path(path, "tests/fuzz/corpus/clip/%zu-%s-%s", k, s.container, s.encoder) < 0 ||
            lg_publish_file(path, f.data, f.bytes) < 0)
            return 1;
        film_free(&f);
    }
    return 0;
}

int main(void)
{
    if (getenv("LG_REGENERATE")) return write_seeds();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_cut_in_open_group),
        cmocka_unit_test(test_rates),
        cmocka_unit_test(test_caller_fails),
        cmocka_unit_test(test_disk_fails),
        cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_lying_containers),
        cmocka_unit_test(test_order_unsaid),
        cmocka_unit_test(test_turned),
        cmocka_unit_test(test_large_frames),
        cmocka_unit_test(test_ten_hours),
        cmocka_unit_test(test_damaged_group),
        cmocka_unit_test(test_last_frame_cut),
        cmocka_unit_test(test_wrong_bits),
        cmocka_unit_test(test_hidden_frame),
        cmocka_unit_test(test_reads_in_circles),
        cmocka_unit_test(test_other_files),
        cmocka_unit_test(test_instruction_sets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
