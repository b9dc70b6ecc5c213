/* Which checkpoints stay. */
#pragma once
#include "config/manifest.h"

struct lg_retention {
    const char *dir;           /* of the checkpoints */
    const lg_manifest *newest; /* just published there: whose name, lineage and step count */
    int keep;                  /* at least 1 */
    bool shared; /* other hosts write there: temporary directories of later steps are theirs */
};
/* Removes what is older than the `keep` newest complete checkpoints of this name and lineage, and the
 * temporary directories of former attempts.
 *
 *   - A checkpoint of another lineage is not counted and not removed, nor one of which it cannot be
 *     known (its manifest is not readable, or there is none). One of a build that wrote no lineage is
 *     ours when it was made by the same plan.
 *   - One of a later step than `newest` is not counted and not removed either, whosever it is: so the
 *     newest one that this run has published always stays.
 *   - Complete is what a start goes on from (lg_manifest_newest): one that is damaged does not count as
 *     kept, and goes when it is older than those that are.
 * A removal first renames to .old-..., durably, so that neither a crash nor a power cut leaves half a
 * checkpoint under a real name. Links are removed, never followed. */
int lg_retention_apply(const struct lg_retention *r);
