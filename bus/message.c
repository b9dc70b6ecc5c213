/* Messages; see message.h.
 *
 * Written by msgpack-c, read by hand: msgpack-c's unpacker allocates what an array's header
 * announces before it looks whether the bytes are there. The reader below knows the handful of
 * encodings that the seven fields can have and never looks past the end. */
#include "bus/message.h"
#include <msgpack/pack.h>
#include <string.h>

enum { FIELDS = 7 };

const char *lg_message_name(lg_message_kind k)
{
    static const char *const names[] = {
#define LG_MESSAGE(name) #name,
#include "bus/messages.def"
#undef LG_MESSAGE
    };
    return k >= 0 && k < LG_MESSAGE_KINDS ? names[k] : "?";
}

struct writer {
    unsigned char *at;
    size_t bytes;
};

static int append(void *data, const char *bytes, size_t n)
{
    struct writer *w = data;
    LG_ASSERT(w->bytes + n <= LG_MESSAGE_BYTES);
    memcpy(w->at + w->bytes, bytes, n);
    w->bytes += n;
    return 0;
}

/* The longest prefix of at most `max` bytes that does not cut a UTF-8 sequence in two. */
static size_t text_prefix(const char *text, size_t max)
{
    size_t n = strnlen(text, max + 1);
    if (n <= max) return n;
    n = max;
    while (n && ((unsigned char)text[n] & 0xC0) == 0x80) n--;
    return n;
}

size_t lg_message_pack(const struct lg_message *m, unsigned char ret[LG_MESSAGE_BYTES])
{
    struct writer w = {.at = ret};
    size_t text_bytes = text_prefix(m->text, LG_MESSAGE_TEXT_MAX);
    msgpack_packer p;
    msgpack_packer_init(&p, &w, append);
    msgpack_pack_array(&p, FIELDS);
    msgpack_pack_uint32(&p, LG_MESSAGE_VERSION);
    msgpack_pack_uint32(&p, (uint32_t)m->kind);
    msgpack_pack_uint32(&p, (uint32_t)m->role);
    msgpack_pack_uint32(&p, (uint32_t)m->index);
    msgpack_pack_uint32(&p, m->incarnation);
    msgpack_pack_uint32(&p, (uint32_t)m->level);
    msgpack_pack_str(&p, text_bytes);
    msgpack_pack_str_body(&p, m->text, text_bytes);
    return w.bytes;
}

struct reader {
    const unsigned char *at, *end;
    bool bad;
};

static uint32_t read_bytes(struct reader *r, size_t n)
{
    if ((size_t)(r->end - r->at) < n) {
        r->bad = true;
        return 0;
    }
    uint32_t v = 0;
    for (size_t i = 0; i < n; i++) v = v << 8 | *r->at++;
    return v;
}

/* An unsigned number of at most 32 bits, at most max. */
static uint32_t read_uint(struct reader *r, uint32_t max)
{
    uint32_t tag = read_bytes(r, 1), v = tag;
    switch (tag) {
    case 0xCC:
        v = read_bytes(r, 1);
        break;
    case 0xCD:
        v = read_bytes(r, 2);
        break;
    case 0xCE:
        v = read_bytes(r, 4);
        break;
    default:
        if (tag > 0x7F) r->bad = true;
    }
    if (v > max) r->bad = true;
    return r->bad ? 0 : v;
}

static void read_text(struct reader *r, char ret[LG_MESSAGE_TEXT_MAX + 1])
{
    uint32_t tag = read_bytes(r, 1), n = 0;
    if ((tag & 0xE0) == 0xA0)
        n = tag & 0x1F;
    else if (tag == 0xD9 || tag == 0xDA)
        n = read_bytes(r, tag == 0xD9 ? 1 : 2);
    else
        r->bad = true;
    if (n > LG_MESSAGE_TEXT_MAX || (size_t)(r->end - r->at) < n) r->bad = true;
    if (r->bad) return;
    memcpy(ret, r->at, n);
    r->at += n;
    /* It goes to a terminal: no control characters, no embedded end. */
    for (uint32_t i = 0; i < n; i++)
        if ((unsigned char)ret[i] < 0x20 || ret[i] == 0x7F) ret[i] = ' ';
    ret[n] = 0;
}

int lg_message_unpack(const void *data, size_t bytes, struct lg_message *ret)
{
    if (bytes > LG_MESSAGE_BYTES) return LG_ERR_CORRUPT;
    struct reader r = {.at = data, .end = (const unsigned char *)data + bytes};
    struct lg_message m = {0};
    if (read_bytes(&r, 1) != (0x90 | FIELDS)) return LG_ERR_CORRUPT;
    if (read_uint(&r, UINT32_MAX) != LG_MESSAGE_VERSION) return LG_ERR_CORRUPT;
    m.kind = (lg_message_kind)read_uint(&r, LG_MESSAGE_KINDS - 1);
    m.role = (lg_role)read_uint(&r, LG_ROLE_COUNT - 1);
    m.index = (int)read_uint(&r, LG_INSTANCES_MAX - 1);
    m.incarnation = read_uint(&r, UINT32_MAX);
    m.level = (int)read_uint(&r, 255);
    read_text(&r, m.text);
    if (r.bad || r.at != r.end) return LG_ERR_CORRUPT;
    *ret = m;
    return 0;
}
