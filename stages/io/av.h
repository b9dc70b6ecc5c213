/* liblg-av.so: what needs libav (stages/io/av/), a shared object of its own beside the backends. It is opened when it is asked for,
 * since it and what it needs take 90 ms to load and 26 MiB of memory, and machines that train on pictures need not have them. */
#pragma once
#include "base/check.h"

/* What it exports under this name; the caller knows its type. LG_ERR_NOTFOUND: it, or a library that it needs, is not there;
 * LG_ERR_MISMATCH: it was built from other headers. Stays open until the process ends. */
int lg_av_find(const char *symbol, const void **ret);
