/* Event files; see tfevents.h.
 *
 * A record (TFRecord): u64 length, u32 masked CRC-32C of these 8 bytes, the message, u32 masked CRC-32C
 * of it; all little-endian; masked(c) = rotate_right(c, 15) + 0xa282ead8.
 *
 * The message, in protobuf (a field is varint(number << 3 | wire type) and its value):
 *   Event      { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5;
 *                SessionLog session_log = 7 }
 *   Summary    { repeated Value value = 1 }
 *   Value      { string tag = 1; float simple_value = 2; Image image = 4; HistogramProto histo = 5 }
 *   Image      { int32 height = 1, width = 2, colorspace = 3; bytes encoded_image_string = 4 }
 *   HistogramProto { double min = 1, max = 2, num = 3, sum = 4, sum_squares = 5;
 *                repeated double bucket_limit = 6, bucket = 7 } (both packed)
 *   SessionLog { SessionStatus status = 1 } (1: START)
 * The length of a nested message stands before it and is filled in at its end, as a varint of
 * fixed width, which protobuf allows. */
#include "supervisor/views/tfevents.h"
#include <string.h>

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 };
enum { HEAD_BYTES = 12, TAIL_BYTES = 4, NESTED_LENGTH_BYTES = 5, VARINT_BYTES_MAX = 10 };

uint32_t lg_crc32c(const void *data, size_t bytes)
{
    static uint32_t table[256]; /* single-threaded callers; filling it twice gives the same */
    const uint8_t *p = data;
    uint32_t crc = ~0u;
    for (uint32_t i = 0; i < 256 && !table[255]; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
        table[i] = c;
    }
    for (size_t i = 0; i < bytes; i++) crc = table[(crc ^ p[i]) & 255] ^ crc >> 8;
    return ~crc;
}

static uint32_t masked_crc(const void *data, size_t bytes)
{
    uint32_t c = lg_crc32c(data, bytes);
    return (c >> 15 | c << 17) + 0xa282ead8u;
}

/* ---- writing ---- */

static void put(struct lg_tf_buffer *b, const void *data, size_t bytes)
{
    if (b->full || bytes > b->cap - b->bytes) {
        b->full = true;
        return;
    }
    memcpy(b->data + b->bytes, data, bytes);
    b->bytes += bytes;
}

static void put_little(struct lg_tf_buffer *b, uint64_t v, int bytes)
{
    uint8_t out[8];
    for (int i = 0; i < bytes; i++) out[i] = (uint8_t)(v >> 8 * i);
    put(b, out, (size_t)bytes);
}

static void put_varint(struct lg_tf_buffer *b, uint64_t v)
{
    uint8_t out[VARINT_BYTES_MAX];
    size_t n = 0;
    for (; v >= 128; v >>= 7) out[n++] = (uint8_t)(v | 128);
    out[n++] = (uint8_t)v;
    put(b, out, n);
}

static void put_key(struct lg_tf_buffer *b, int field, int wire)
{
    put_varint(b, (uint64_t)(field << 3 | wire));
}

static void put_number(struct lg_tf_buffer *b, int field, uint64_t v)
{
    put_key(b, field, VARINT);
    put_varint(b, v);
}

static void put_bytes(struct lg_tf_buffer *b, int field, const void *data, size_t bytes)
{
    put_key(b, field, LENGTH);
    put_varint(b, bytes);
    put(b, data, bytes);
}

static void put_float(struct lg_tf_buffer *b, int field, double value)
{
    float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    put_key(b, field, FIXED32);
    put_little(b, bits, 4);
}

static void put_double(struct lg_tf_buffer *b, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_little(b, bits, 8);
}

static void put_packed(struct lg_tf_buffer *b, int field, const double *v, int n)
{
    put_key(b, field, LENGTH);
    put_varint(b, 8 * (uint64_t)n);
    for (int i = 0; i < n; i++) put_double(b, v[i]);
}

/* Returns where the nested message begins; its length is filled in by close_nested. */
static size_t open_nested(struct lg_tf_buffer *b, int field)
{
    put_key(b, field, LENGTH);
    put_little(b, 0, NESTED_LENGTH_BYTES);
    return b->bytes;
}

static void close_nested(struct lg_tf_buffer *b, size_t begin)
{
    if (b->full) return;
    size_t bytes = b->bytes - begin;
    for (int i = 0; i < NESTED_LENGTH_BYTES; i++)
        b->data[begin - NESTED_LENGTH_BYTES + (size_t)i] =
            (uint8_t)((bytes >> 7 * i & 127) | (i + 1 < NESTED_LENGTH_BYTES ? 128 : 0));
}

/* Returns where the record begins. */
static size_t open_record(struct lg_tf_buffer *b, double wall_s, uint64_t step)
{
    size_t begin = b->bytes;
    b->full = false;
    put_little(b, 0, 8);
    put_little(b, 0, 4);
    put_key(b, 1, FIXED64);
    put_double(b, wall_s);
    put_number(b, 2, step);
    return begin;
}

static void close_record(struct lg_tf_buffer *b, size_t begin)
{
    if (!b->full) {
        size_t end = b->bytes, bytes = end - begin - HEAD_BYTES;
        b->bytes = begin;
        put_little(b, bytes, 8);
        put_little(b, masked_crc(b->data + begin, 8), 4);
        b->bytes = end;
        put_little(b, masked_crc(b->data + begin + HEAD_BYTES, bytes), TAIL_BYTES);
    }
    if (b->full) b->bytes = begin;
}

void lg_tf_version(struct lg_tf_buffer *b, double wall_s)
{
    static const char version[] = "brain.Event:2";
    size_t record = open_record(b, wall_s, 0);
    put_bytes(b, 3, version, sizeof version - 1);
    close_record(b, record);
}

void lg_tf_start(struct lg_tf_buffer *b, double wall_s, uint64_t step)
{
    size_t record = open_record(b, wall_s, step), session = open_nested(b, 7);
    put_number(b, 1, 1);
    close_nested(b, session);
    close_record(b, record);
}

void lg_tf_scalars(struct lg_tf_buffer *b, double wall_s, uint64_t step,
                   const struct lg_tf_scalar *v, int n)
{
    size_t record = open_record(b, wall_s, step), summary = open_nested(b, 5);
    for (int i = 0; i < n; i++) {
        size_t value = open_nested(b, 1);
        put_bytes(b, 1, v[i].tag, strlen(v[i].tag));
        put_float(b, 2, v[i].value);
        close_nested(b, value);
    }
    close_nested(b, summary);
    close_record(b, record);
}

void lg_tf_picture(struct lg_tf_buffer *b, double wall_s, uint64_t step,
                   const struct lg_tf_image *i)
{
    size_t record = open_record(b, wall_s, step), summary = open_nested(b, 5);
    size_t value = open_nested(b, 1);
    put_bytes(b, 1, i->tag, strlen(i->tag));
    size_t image = open_nested(b, 4);
    put_number(b, 1, i->height);
    put_number(b, 2, i->width);
    put_number(b, 3, 3); /* RGB */
    put_bytes(b, 4, i->file, i->bytes);
    close_nested(b, image);
    close_nested(b, value);
    close_nested(b, summary);
    close_record(b, record);
}

void lg_tf_histograms(struct lg_tf_buffer *b, double wall_s, uint64_t step,
                      const struct lg_tf_histogram *v, int n)
{
    size_t record = open_record(b, wall_s, step), summary = open_nested(b, 5);
    for (int i = 0; i < n; i++) {
        const double head[] = {v[i].min, v[i].max, v[i].count, v[i].sum, v[i].sum_squares};
        size_t value = open_nested(b, 1);
        put_bytes(b, 1, v[i].tag, strlen(v[i].tag));
        size_t histogram = open_nested(b, 5);
        for (int k = 0; k < (int)LG_ARRAY_LEN(head); k++) {
            put_key(b, k + 1, FIXED64);
            put_double(b, head[k]);
        }
        put_packed(b, 6, v[i].limits, v[i].n);
        put_packed(b, 7, v[i].counts, v[i].n);
        close_nested(b, histogram);
        close_nested(b, value);
    }
    close_nested(b, summary);
    close_record(b, record);
}

/* ---- reading ---- */

struct span {
    const uint8_t *at, *end;
};

static bool take_varint(struct span *s, uint64_t *ret)
{
    uint64_t v = 0;
    for (int i = 0; i < VARINT_BYTES_MAX && s->at < s->end; i++) {
        uint8_t byte = *s->at++;
        v |= (uint64_t)(byte & 127) << 7 * i;
        if (byte < 128) {
            *ret = v;
            return true;
        }
    }
    return false;
}

struct field {
    int number;
    uint64_t value;     /* VARINT */
    struct span nested; /* LENGTH */
};

/* The next field of a message; false at its end (s->at == s->end) or where it is broken. */
static bool take_field(struct span *s, struct field *ret)
{
    uint64_t key, bytes = 0;
    *ret = (struct field){0};
    if (!take_varint(s, &key) || key >> 3 > 1000) return false;
    ret->number = (int)(key >> 3);
    switch (key & 7) {
    case VARINT:
        return take_varint(s, &ret->value);
    case LENGTH:
        if (!take_varint(s, &bytes)) return false;
        break;
    case FIXED64:
        bytes = 8;
        break;
    case FIXED32:
        bytes = 4;
        break;
    default:
        return false;
    }
    if (bytes > (uint64_t)(s->end - s->at)) return false;
    ret->nested = (struct span){s->at, s->at + bytes};
    s->at += bytes;
    return true;
}

/* By the first value of a summary: has it an image, or a histogram? */
static lg_tf_kind kind_of(struct span summary)
{
    struct field value, f;
    if (!take_field(&summary, &value) || value.number != 1) return LG_TF_SCALARS;
    while (take_field(&value.nested, &f)) {
        if (f.number == 4) return LG_TF_PICTURE;
        if (f.number == 5) return LG_TF_HISTOGRAMS;
    }
    return LG_TF_SCALARS;
}

static uint64_t little(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

bool lg_tf_read(const uint8_t *data, size_t bytes, struct lg_tf_record *ret)
{
    struct field f;
    if (bytes < HEAD_BYTES + TAIL_BYTES || little(data + 8, 4) != masked_crc(data, 8)) return false;
    uint64_t n = little(data, 8);
    if (n > bytes - HEAD_BYTES - TAIL_BYTES) return false;
    const uint8_t *message = data + HEAD_BYTES;
    if (little(message + n, 4) != masked_crc(message, (size_t)n)) return false;
    struct lg_tf_record r = {.bytes = (size_t)n + HEAD_BYTES + TAIL_BYTES};
    struct span s = {message, message + n};
    while (s.at < s.end) {
        if (!take_field(&s, &f)) return false;
        if (f.number == 2) r.step = f.value;
        if (f.number == 5) r.kind = kind_of(f.nested);
    }
    *ret = r;
    return true;
}
