/* Epochs in the folder that all hosts see (hosts.shared): FOLDER/epochs/LINEAGE/FORMATION.NUMBER is a text file, made
 * once by link(), which is atomic on every file system that hosts share, and never changed. */
#pragma once
#include "base/fs.h"
#include "supervisor/hosts/group.h"

/* Makes the file of e->number, unless there is one; *ret is what it says. Blocks as long as the file system does. */
int lg_shared_link(const char *folder, uint64_t lineage, const struct lg_epoch *e,
                   struct lg_epoch *ret);
