/* The safetensors format: 8 bytes little-endian header length, JSON header, data.
 * https://huggingface.co/docs/safetensors: each tensor has dtype, shape and data_offsets; offsets
 * are relative to the end of the header, do not overlap and leave no holes.
 *
 * Reading maps the file; nothing is copied until lg_st_read_f32. Every size and offset of the
 * header is checked against the file's size before use; a truncated file is LG_ERR_CORRUPT and says
 * how many bytes are missing. */
#pragma once
#include "base/check.h"
#include "kernels/tensor.h"

typedef struct lg_st_file lg_st_file;

struct lg_st_entry {
    const char *name;
    lg_dtype dtype;
    int rank;
    int64_t dim[8];
    const void *data; /* in the mapping */
    size_t bytes;
    size_t file_offset; /* of data, from the start of the file */
};
int lg_st_open(const char *path, lg_st_file **ret);
/* The same from memory, which stays the caller's and must outlive *ret. label: what messages call
 * it
 * ("shard-00001.tar: 0042.latent.safetensors"). */
int lg_st_open_memory(const char *label, const void *data, size_t bytes, lg_st_file **ret);
void lg_st_close(lg_st_file **f);
/* The format's own name of a type: "BF16". */
const char *lg_st_type_name(lg_dtype t);
int lg_st_count(const lg_st_file *f);
const struct lg_st_entry *lg_st_at(const lg_st_file *f, int i); /* in file order */
/* NULL when there is none. */
const struct lg_st_entry *lg_st_find(const lg_st_file *f, const char *name);
/* Value of a key of __metadata__ or NULL. */
const char *lg_st_metadata(const lg_st_file *f, const char *key);
/* Elements [first, first + count) as fp32; f16, bf16, f32, f64 are accepted. */
int lg_st_read_f32(const struct lg_st_entry *e, float *dst, size_t first, size_t count);

/* Writing: declare every tensor, then stream the data in that order. The data starts 8-byte
 * aligned, by padding the header with spaces. The bytes go to a temporary beside path; finish
 * fsyncs, renames and fsyncs the directory, so a file under its name is complete. Writing to memory
 * is for members of archives. */
typedef struct lg_st_writer lg_st_writer;
int lg_st_writer_open(const char *path, lg_st_writer **ret);
int lg_st_writer_open_memory(lg_st_writer **ret);
int lg_st_writer_metadata(lg_st_writer *w, const char *key, const char *value);
int lg_st_writer_declare(lg_st_writer *w, const char *name, lg_dtype dtype, int rank,
                         const int64_t *dim);
/* Appends data of the declared tensors, in order, in pieces of any size. */
int lg_st_writer_data(lg_st_writer *w, const void *data, size_t bytes);
/* Publishes the file; not all declared bytes written is a bug. *w becomes NULL either way. ret_hash
 * (may be NULL) gets XXH3-64 of the whole file. */
int lg_st_writer_finish(lg_st_writer **w, uint64_t *ret_hash);
/* Of a writer to memory; the caller frees *ret_data. */
int lg_st_writer_finish_memory(lg_st_writer **w, void **ret_data, size_t *ret_bytes);
/* Drops an unfinished file. */
void lg_st_writer_abort(lg_st_writer **w);
