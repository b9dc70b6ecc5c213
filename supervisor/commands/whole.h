/* `lgsup status` and `lgsup top`: this host, and of a run of several the others, too. */
#pragma once
#include "base/check.h"

/* host: of --host, NULL: all. */
int lg_whole_status(const char *dir, const char *host, bool json);
int lg_whole_top(const char *dir, const char *host, bool once);
