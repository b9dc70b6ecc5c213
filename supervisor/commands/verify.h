/* `lgsup verify DIR`: a checkpoint (every file's size and hash) or a run (every complete checkpoint,
 * and the ledger up to the newest one). */
#pragma once
#include "base/check.h"

int lg_verify(const char *dir);
