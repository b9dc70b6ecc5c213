/* A shard's state as a row of bytes, in which a host hands it to another that has none (exchanger.h): scalars, weights,
 * moments as they lie, average; with rank 0 also the records of the ledger up to there, so that the file is whole on a host
 * that takes another's place. Both hosts run the same plan and build, so that it lies alike. */
#pragma once
#include "stages/exchange/exchanger.h"
#include "stages/trainer/state.h"

typedef struct lg_state_bytes lg_state_bytes;
/* Of rank st->index, whose state d maps. The stage closes the regions. */
int lg_state_bytes_open(lg_stage *st, lg_device *d, lg_trainer_state *s, lg_state_bytes **ret);
void lg_state_bytes_close(lg_state_bytes **b);
size_t lg_state_bytes_count(const lg_state_bytes *b, uint64_t state);
/* Is this state here, whole? */
bool lg_state_bytes_are(const lg_state_bytes *b, uint64_t state);
int lg_state_bytes_read(lg_state_bytes *b, const struct lg_exchanger_state *of, void *to);
/* The first bytes take away the stamps of what was there; the last ones are to be followed by _end, which sets them. */
int lg_state_bytes_write(lg_state_bytes *b, const struct lg_exchanger_state *of, const void *from);
void lg_state_bytes_end(lg_state_bytes *b, uint64_t state);
