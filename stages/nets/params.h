/* Parameter tables. A net's parameters are one flat buffer of the device's compute type (fp32 on
 * the host), cut by a table: name, shape, offset. Gradients, moments and EMA use the same cut.
 * Names and shapes are those of the model's safetensors file, except where `layout` says that the
 * buffer holds a permuted tensor. */
#pragma once
#include "base/check.h"
#include "config/param_groups.h"
#include "kernels/adamw8.h"
#include "kernels/rows8.h"
#include "kernels/tensor.h"

enum { LG_PARAM_NAME_BYTES = 112, LG_PARAM_RANK_MAX = 5 };

typedef enum lg_param_layout {
    LG_LAYOUT_FILE, /* as in the file */
    LG_LAYOUT_CONV_OHWI, /* file (Co, Ci, kh, kw), buffer (Co, kh, kw, Ci); over time with kt before kh */
} lg_param_layout;

typedef enum lg_param_init {
    LG_INIT_ZERO,
    LG_INIT_ONE,
    LG_INIT_NORMAL,  /* init_scale * standard normal */
    LG_INIT_UNIFORM, /* init_scale * uniform(-1, 1); Xavier's bound is init_scale */
    LG_INIT_SINCOS, /* (1, n n, D): sinusoidal positions of n x n patches, init_scale of which are one (sincos.h) */
} lg_param_init;

struct lg_param {
    char name[LG_PARAM_NAME_BYTES];
    int rank;
    int64_t dim[LG_PARAM_RANK_MAX]; /* as in the file */
    lg_param_layout layout;
    lg_param_init init;
    double init_scale;
    size_t offset;        /* elements from the start of the flat buffer */
    size_t count;         /* elements */
    bool packed;          /* one product with the one before */
    int unit;             /* that it lies in; -1: there are none */
    int group;            /* of the table's */
    bool is_frozen;       /* not trained */
    bool is_block_matrix; /* a linear's, in one of the net's blocks: */
    bool in_8_bits;       /* it may be stored so (storage.h), and it is, */
    lg_rows8 format;      /* as this */
    bool is_fixed;        /* never trained: a table, or what an adapter adapts */
};

/* A stretch of the buffer that is gathered, exchanged and recomputed together: a block, or what stands before or
 * behind the blocks. */
struct lg_param_unit {
    char name[32];
    size_t first, count; /* elements; count up to the next unit's first */
};

typedef struct lg_params {
    struct lg_param *p;
    int n;
    struct lg_param_unit *unit; /* of a net that is trained, every parameter lies in one */
    int n_units;
    struct lg_param_group *group; /* 0: as the config says of all; none before lg_params_group */
    int n_groups;
    size_t count; /* elements of the whole buffer, a multiple of LG_PARAM_ALIGN */
    /* Adam's moments are kept in blocks (kernels/adamw8.h), all or those of some groups: what is LG_PARAM_ALIGN below is LG_ADAMW8_BLOCK, so that no
     * block has elements of two tensors. Set before the first parameter is added. */
    bool in_blocks;
    /* What is trained comes first (lg_params_split): so many parameters, units, elements. */
    int trained, trained_units;
    size_t trained_count;
} lg_params;

/* Every parameter starts at a multiple of this many elements (gaps are zero and stay zero), except
 * that neighbours added with lg_params_add_packed follow without a gap (q, k, v: one GEMM). */
enum { LG_PARAM_ALIGN = 16 };
/* Units begin at multiples of this many: the pieces of which the gradient's squares are summed
 * (lg_reduce_ranks), so that no piece lies in two. */
enum { LG_UNIT_ALIGN = 4096 };

/* What is added from now on belongs to a new unit of this name. */
void lg_params_begin_unit(lg_params *t, const char *name_fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Adds a row; spec carries name, rank, dim, layout, init. Returns its index. */
int lg_params_add(lg_params *t, const struct lg_param *spec);
int lg_params_add_packed(lg_params *t, const struct lg_param *spec);
void lg_params_free(lg_params *t);
/* The table of one unit alone, a buffer of its own. */
lg_params lg_params_of_unit(const lg_params *t, int unit);
/* How the parameters are trained that no group says otherwise of. */
struct lg_params_grouping {
    const char *const *texts; /* config/param_groups.h, up to NULL; NULL: none */
    bool is_8_bit;            /* trainer.optimizer is adamw8bit */
};
/* Do any of their moments lie in blocks? Texts that cannot be read say nothing. */
bool lg_params_in_blocks(const struct lg_params_grouping *g);
/* Sorts the parameters into groups, of which the texts are numbers 1 and on. LG_ERR_CONFIG: one that fits no name, that
 * freezes or stores a part of one product otherwise than the rest, or, in blocks, parts one in the middle of a block, or that
 * has an optimizer of 8 bits for no tensor that has codes. */
int lg_params_group(lg_params *t, const struct lg_params_grouping *g);
/* What is frozen leaves its units for others, "NAME frozen", behind all that are trained, so that gradients, state and
 * shards are those of a table of its own. Without anything frozen the table stays as it is. LG_ERR_CONFIG: nothing is
 * left to train. Once, after lg_params_group. */
int lg_params_split(lg_params *t);
/* The two parts as tables, which point into t and are not freed: what is trained, a table like any other, and what is
 * frozen, whose offsets are those of t and whose units are none. */
lg_params lg_params_trained(const lg_params *t);
lg_params lg_params_frozen(const lg_params *t);
/* The group of element `first`, a gap's being that of the parameter before it; returns where another's begins, at most
 * `end`. */
size_t lg_params_group_end(const lg_params *t, size_t first, size_t end, int *ret_group);
/* In blocks, the moments of a tensor (parameters that are one product are one tensor) of at least so many elements are
 * codes, where its group's optimizer is of 8 bits (all are, before lg_params_group); those of others, and of tables that are
 * not in blocks, are fp32. */
enum { LG_CODED_MIN = 4096 };
bool lg_params_is_coded(const lg_params *t, int i);
/* Where in its tensor a parameter begins. */
size_t lg_params_in_tensor(const lg_params *t, int i);
/* Whether element `first` has a code, a gap's being as the parameter before it; returns where that changes, at most
 * `end`. */
size_t lg_params_coded_end(const lg_params *t, size_t first, size_t end, bool *ret_coded);
/* Index of a name or -1. */
int lg_params_find(const lg_params *t, const char *name);

/* Fills dst (host fp32, elements [first, first + count) of the flat buffer) with initial values
 * from Philox INIT: element e of a parameter depends on (seed, its name, e) alone, so shards agree
 * and a parameter keeps its values in whatever table it stands. Gaps
 * and tables become zero. Large ranges are filled by as many threads as the process may use cores (a core
 * draws 90 M values a second). */
void lg_params_init(const lg_params *t, uint64_t seed, float *dst, size_t first, size_t count);

/* Reads the parameters from a safetensors file (or the shards of an index.json: see weights.h) into
 * a host fp32 buffer, elements [first, first + count); gaps and tables become zero. Checks that
 * every name is there with its shape (LG_ERR_MISMATCH); fp16, bf16 and fp32 are accepted. Names in
 * the file that the table lacks are refused unless allowed_extra (a NULL-terminated list of
 * prefixes, may be NULL) covers them. All of that is looked at whatever the range is: with count 0, and dst NULL, nothing
 * else is. */
int lg_params_load(const lg_params *t, const char *path, const char *const *allowed_extra,
                   float *dst, size_t first, size_t count);
