/* `lgsup role`: what the unit of a role runs; see systemd.h. */
#pragma once

/* `lgsup role ROLE K DIR`: waits until the run of this runtime directory ($RUNTIME_DIRECTORY) can
 * be joined, takes an incarnation for instance K and becomes its program. Ends with 0 when there has
 * been no lgsup for a minute and nothing to join. Does not return when it has become the program. */
int lg_units_role(const char *role, const char *index, const char *dir);
