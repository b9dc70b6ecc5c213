/* What the fuzz targets share: the entry point, files without a disk, cutting the input up.
 *
 * A target feeds bytes to one parser and asserts what the parser's header promises about the result;
 * the sanitizers see the rest. It must be a function of its input alone, leave nothing allocated or
 * open, and take well under a millisecond for small inputs. Input that the parser refuses is no
 * finding: the trace is cleared after each run. */
#pragma once
#include "base/check.h"

/* LG_FUZZ_TARGET(tar) { ... } defines void lg_fuzz_tar(const uint8_t *data, size_t bytes) and, in a
 * build for libFuzzer, the function that libFuzzer calls. data may be NULL when bytes is 0. */
#define LG_FUZZ_TARGET(name)                                                                       \
    void lg_fuzz_##name(const uint8_t *data, size_t bytes);                                        \
    LG_FUZZ_ENTRY_POINT(name)                                                                      \
    void lg_fuzz_##name(const uint8_t *data, size_t bytes)
#ifdef LG_FUZZ_ENTRY
#define LG_FUZZ_ENTRY_POINT(name)                                                                  \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);                                 \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)                                  \
    {                                                                                              \
        lg_fuzz_quiet();                                                                           \
        lg_fuzz_##name(data, bytes);                                                               \
        lg_err_clear();                                                                            \
        return 0;                                                                                  \
    }
#else
#define LG_FUZZ_ENTRY_POINT(name)
#endif
/* Drops log lines below LG_ERROR. */
void lg_fuzz_quiet(void);

/* Path of an unlinked file in memory that holds these bytes until the next call with this slot, a
 * number below LG_FUZZ_FILES. */
enum { LG_FUZZ_FILES = 3 };
const char *lg_fuzz_file(int slot, const void *data, size_t bytes);
/* A folder of this process, made by the first call under TMPDIR (or /tmp), removed at exit. */
const char *lg_fuzz_dir(void);
/* "DIR/name", valid until the next call. The file there is created or replaced. */
const char *lg_fuzz_write(const char *name, const void *data, size_t bytes);
/* DIR/name becomes a link to the file in memory of this slot, which is much quicker to write. Returns
 * DIR, for the rest of the process. */
const char *lg_fuzz_link(const char *name, int slot);
/* Number of open descriptors below 1024. */
int lg_fuzz_fds(void);

/* A piece of the input and what is left of it. Reading past the end gives zeros and no bytes. */
struct lg_fuzz_input {
    const uint8_t *data;
    size_t bytes;
};
unsigned lg_fuzz_u8(struct lg_fuzz_input *in);
unsigned lg_fuzz_u16(struct lg_fuzz_input *in); /* little-endian */
/* The next bytes_max bytes or what is there, in memory of its own of exactly that size and a NUL
 * behind it that *ret_bytes does not count. The caller frees. */
char *lg_fuzz_take(struct lg_fuzz_input *in, size_t bytes_max, size_t *ret_bytes);
/* The same up to the first NUL or the end; the NUL is consumed. */
char *lg_fuzz_text(struct lg_fuzz_input *in);
