/* See frozen.h. */
#include "stages/trainer/frozen.h"
#include "stages/stored.h"

int lg_frozen_place(const lg_config *c, int rank)
{
    return LG_MAX(lg_plan_gpu(c, LG_ROLE_trainer, rank), 0);
}

size_t lg_frozen_bytes(const lg_params *all, lg_dtype type)
{
    return lg_stored_bytes(all, type) - all->trained_count * lg_dtype_bytes(type);
}

static int load(lg_stage *st, size_t first, size_t count, float *ret, void *arg)
{
    return lg_stage_park_if_lasting(st, lg_frozen_read(st, arg, first, count, ret),
                                    "the weights that are not trained cannot be read");
}

int lg_frozen_open(lg_stage *st, lg_device *d, const lg_trainer_state *s, const void **ret)
{
    const size_t bytes = lg_frozen_bytes(&s->all, lg_device_dtype(d));
    lg_region *r;
    *ret = NULL;
    if (!bytes) return 0;
    LG_TRY(lg_stage_region(
        st,
        &(struct lg_stage_memory){
            .bytes = bytes, .device = d, .role = LG_ROLE_trainer, .index = st->index},
        &r, "frozen/%d/weights", lg_frozen_place(st->config, st->index)));
    LG_TRY(lg_stored_fill(st, r,
                          &(struct lg_stored_fill){.device = d,
                                                   .table = &s->all,
                                                   .first = s->all.trained_count,
                                                   .load = load,
                                                   .arg = (void *)s}));
    *ret = r->payload;
    return 0;
}

const void *lg_frozen_unit(const lg_trainer_state *s, const lg_device *d, const void *frozen,
                           int unit)
{
    const lg_dtype type = lg_device_dtype(d);
    return (const char *)frozen +
           (lg_stored_unit_at(&s->all, unit, type) - s->all.trained_count * lg_dtype_bytes(type));
}
