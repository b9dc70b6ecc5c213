/* `lgsup logs [-f] [ROLE[.INDEX]] DIR`: the lines of all processes in the order of their time. */
#pragma once
#include "base/check.h"

/* role: NULL for all, "vae" or "vae.1". follow: goes on until it is interrupted. */
int lg_logs(const char *dir, const char *role, bool follow);
