/* Fuzz target: a safetensors file in memory. Every entry that it has must lie within the bytes, be
 * found by its name and be readable from end to end. */
#include "stages/io/safetensors.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

enum { PIECE = 64 };

static void read_entry(const struct lg_st_entry *e)
{
    float piece[PIECE];
    size_t n = e->bytes / lg_dtype_bytes(e->dtype);
    for (size_t at = 0; at < n; at += PIECE)
        if (lg_st_read_f32(e, piece, at, LG_MIN(n - at, (size_t)PIECE)) < 0) return;
}

LG_FUZZ_TARGET(safetensors)
{
    lg_st_file *f = NULL;
    if (lg_st_open_memory("fuzz.safetensors", data, bytes, &f) < 0) {
        LG_ASSERT(!f && lg_err_message()[0]);
        return;
    }
    size_t total = 0;
    for (int i = 0; i < lg_st_count(f); i++) {
        const struct lg_st_entry *e = lg_st_at(f, i);
        LG_ASSERT(e->file_offset <= bytes && e->bytes <= bytes - e->file_offset);
        LG_ASSERT(!e->bytes || (const uint8_t *)e->data == data + e->file_offset);
        LG_ASSERT(lg_st_find(f, e->name) == e && e->rank >= 0 && e->rank <= 8);
        uint64_t need = lg_dtype_bytes(e->dtype);
        for (int k = 0; k < e->rank; k++) need *= (uint64_t)e->dim[k];
        LG_ASSERT(need == e->bytes);
        read_entry(e);
        total += e->bytes;
    }
    LG_ASSERT(total <= bytes);
    LG_ASSERT(!lg_st_find(f, "no tensor has this name, or does it?") || total <= bytes);
    const char *format = lg_st_metadata(f, "format");
    LG_ASSERT(!format || strlen(format) < bytes);
    lg_st_close(&f);
    LG_ASSERT(!f);
}
