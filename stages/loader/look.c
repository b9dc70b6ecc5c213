/* A look at a data set; see look.h. */
#include "stages/loader/look.h"

int lg_loader_order(const lg_plan *p, const struct lg_item_size *size, uint64_t count,
                    lg_order **ret)
{
    LG_TRY(lg_order_make(
        &(struct lg_order_spec){
            .buckets = &p->buckets,
            .size = size,
            .count = count,
            .ranks = (uint64_t)(p->instances[LG_ROLE_trainer] / p->sequence),
            .micros = (uint64_t)(p->rank_batch / p->micro_batch),
            .micro = (uint64_t)p->micro_batch,
        },
        ret));
    return 0;
}
