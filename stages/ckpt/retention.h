/* Which checkpoints stay. */
#pragma once

/* Removes what is older than the `keep` newest complete checkpoints <dir>/<name>_step<N>, and temporary
 * directories of former attempts. The newest complete one is never removed. Complete is what a start
 * goes on from (lg_manifest_newest): one that is damaged does not count as kept, and goes when it is
 * older than those that are; one without a manifest is left alone. A removal first renames to .old-...,
 * durably, so that neither a crash nor a power cut leaves half a checkpoint under a real name. */
int lg_retention_apply(const char *dir, const char *name, int keep);
