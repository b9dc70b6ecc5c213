/* Epochs in the folder that all hosts see (hosts.shared): FOLDER/epochs/LINEAGE/FORMATION.NUMBER is a text file, made
 * once by link(), which is atomic on every file system that hosts share, and never changed. The file `folder` beside them is
 * made in the same way by the first start, and says which folder it is: a random number. Where the file system is not
 * mounted there is another one, or none, and nothing may be decided there. */
#pragma once
#include "base/fs.h"
#include "supervisor/hosts/group.h"

/* Which folder it is, never 0; make: if it has no number yet it gets one. LG_ERR_NOTFOUND: it has none. Blocks as long as the
 * file system does, as does the next one. */
int lg_shared_number(const char *folder, uint64_t lineage, bool make, uint64_t *ret);
/* Makes the file of e->number, unless there is one; *ret is what it says. `number`: of the folder in which that counts,
 * 0: not known. */
struct lg_shared_place {
    const char *folder;
    uint64_t lineage, number;
};
int lg_shared_link(const struct lg_shared_place *at, const struct lg_epoch *e,
                   struct lg_epoch *ret);
