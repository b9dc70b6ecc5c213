/* The id of a lineage; see lineage.h. Hashed as text, as a plan is: independent of byte order. */
#include "config/lineage.h"
#include "base/fs.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

uint64_t lg_lineage_new(const lg_config *c, const lg_plan *p, uint64_t weights)
{
    char text[512];
    /* A constant rate has no length that would change anything. */
    int64_t lr_steps = strcmp(c->trainer_lr_schedule, "constant") ? p->lr_steps : 0;
    int n = snprintf(text, sizeof text,
                     "lineage=1;plan=%016" PRIx64 ";lr_steps=%" PRId64 ";weights=%016" PRIx64
                     ";name=%016" PRIx64 ";",
                     p->hash, lr_steps, weights, lg_hash(c->job_name, strlen(c->job_name)));
    LG_ASSERT(n > 0 && n < (int)sizeof text);
    uint64_t id = lg_hash(text, (size_t)n);
    return id ? id : 1;
}

uint64_t lg_lineage_changed(uint64_t lineage, const lg_plan *p, uint64_t step)
{
    char text[128];
    int n =
        snprintf(text, sizeof text, "lineage=%016" PRIx64 ";plan=%016" PRIx64 ";step=%" PRIu64 ";",
                 lineage, p->hash, step);
    LG_ASSERT(n > 0 && n < (int)sizeof text);
    uint64_t id = lg_hash(text, (size_t)n);
    return id ? id : 1;
}
