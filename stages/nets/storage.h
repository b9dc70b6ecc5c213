/* Weights that are not trained may be stored in 8 bits (kernels/rows8.h): the matrices of the linears of a net's blocks, of
 * at least LG_STORAGE_MIN elements. Biases, norms, embeddings and whatever stands before and behind the blocks, where a
 * model is most sensitive, keep the type of the computation. A table (params.h) counts elements all the same; where they
 * lie is asked here.
 *
 * In memory unit follows unit, as their elements do. A unit without such matrices is an array of the type of the
 * computation, each element at its number. In others each tensor (parameters that are one product are one) begins at a
 * multiple of 64 bytes, in the order of the table; one in 8 bits has
 *
 *     scale (rows)            of fp32, of ref64 f64; of all its parameters
 *     code  (rows, columns)   bytes, from a multiple of 64 on; of all its parameters
 */
#pragma once
#include "kernels/rows8.h"
#include "stages/nets/params.h"

enum { LG_STORAGE_MIN = 4096 };

/* The words of the config's keys: "auto", "fp8", "int8". */
lg_storage lg_storage_of(const char *word);
lg_rows8 lg_storage_format(lg_storage storage);

/* From now on the parameters from `first` on are stored so, but those of a group with a storage of its own (of one product all
 * or none, lg_params_group) as that says. */
void lg_storage_set(lg_params *t, lg_storage storage, int first);
/* Are any in 8 bits? */
bool lg_storage_any(const lg_params *t);

struct lg_stored {
    size_t at;       /* bytes from where its unit begins; the first element's, or code's */
    size_t scale_at; /* in 8 bits: of the scale of its first row */
};
/* type: of the computation. A table without units is one. */
struct lg_stored lg_stored_place(const lg_params *t, int param, lg_dtype type);
bool lg_stored_has_codes(const lg_params *t, int unit);
/* Bytes of a unit, and where it begins, from the table's first. */
size_t lg_stored_unit_bytes(const lg_params *t, int unit, lg_dtype type);
size_t lg_stored_unit_at(const lg_params *t, int unit, lg_dtype type);
/* Of the whole table. */
size_t lg_stored_bytes(const lg_params *t, lg_dtype type);
