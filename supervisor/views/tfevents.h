/* TensorBoard's event files: a sequence of records, each one protobuf message "Event". Only what we
 * write is known here; see tfevents.c for the bytes. Writing goes to memory, reading checks bytes. */
#pragma once
#include "base/check.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* CRC-32C (Castagnoli) of bytes. */
uint32_t lg_crc32c(const void *data, size_t bytes);

/* A record that grows in a buffer of the caller; `full` once something did not fit. */
struct lg_tf_buffer {
    uint8_t *data;
    size_t bytes, cap;
    bool full;
};

/* Each of these appends one whole record, or nothing and sets `full`. */
/* "brain.Event:2": begins a file. */
void lg_tf_version(struct lg_tf_buffer *b, double wall_s);
/* What earlier files say of steps >= `step` is void. */
void lg_tf_start(struct lg_tf_buffer *b, double wall_s, uint64_t step);
struct lg_tf_scalar {
    const char *tag;
    double value;
};
void lg_tf_scalars(struct lg_tf_buffer *b, double wall_s, uint64_t step,
                   const struct lg_tf_scalar *v, int n);
struct lg_tf_image {
    const char *tag;
    const uint8_t *file; /* PNG or GIF, which TensorBoard tells apart */
    size_t bytes;
    uint32_t width, height;
};
void lg_tf_picture(struct lg_tf_buffer *b, double wall_s, uint64_t step,
                   const struct lg_tf_image *i);
/* Bytes that a picture's record needs at most beside its file. */
enum { LG_TF_PICTURE_EXTRA = 256 };

/* limits: upper ones, rising; counts: of each bucket. */
struct lg_tf_histogram {
    const char *tag;
    double min, max, count, sum, sum_squares;
    const double *limits, *counts; /* (n) */
    int n;
};
void lg_tf_histograms(struct lg_tf_buffer *b, double wall_s, uint64_t step,
                      const struct lg_tf_histogram *v, int n);
/* Bytes that a record needs at most, and each histogram in it beside its tag and 16 a bucket. */
enum { LG_TF_HISTOGRAM_EXTRA = 128 };

typedef enum lg_tf_kind { LG_TF_OTHER, LG_TF_SCALARS, LG_TF_PICTURE, LG_TF_HISTOGRAMS } lg_tf_kind;
struct lg_tf_record {
    size_t bytes; /* of the whole record */
    lg_tf_kind kind;
    uint64_t step;
};
/* The record at the beginning of data. False when it is not whole, damaged or no event. */
bool lg_tf_read(const uint8_t *data, size_t bytes, struct lg_tf_record *ret);
