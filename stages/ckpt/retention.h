/* Which checkpoints stay. */
#pragma once

/* Removes complete checkpoints <dir>/<name>_step<N> beyond the `keep` newest, and temporary
 * directories of former attempts. The newest complete one is never removed; incomplete ones do not
 * count as kept. A removal first renames to .old-..., so that a crash leaves no half checkpoint
 * under a real name. */
int lg_retention_apply(const char *dir, const char *name, int keep);
