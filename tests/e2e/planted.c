/* Bad programs for swap.sh: a checkpoint writer that fails in the way of its own name.
 *
 *   other-layout   was built with another layout of the shared structures
 *   dies-at-work   sets up well as a standby, and fails at the first thing it has to do */
#define lg_layout_hash lg_real_layout_hash
#include "shm/layout.c"
#undef lg_layout_hash
#include "stages/roles.h"
#include <string.h>

static bool g_other_layout;

/* In place of the library's. */
uint64_t lg_layout_hash(void);
uint64_t lg_layout_hash(void)
{
    return lg_real_layout_hash() ^ (g_other_layout ? UINT64_C(1) << 20 : 0);
}

static int die(lg_stage *st)
{
    (void)st;
    return LG_FAIL(LG_ERR_CORRUPT, "planted: it dies at work");
}

int main(int argc, char **argv)
{
    struct lg_stage_def def = lg_ckpt_def;
    g_other_layout = strstr(argv[0], "other-layout") != NULL;
    if (strstr(argv[0], "dies-at-work")) def.step = die;
    return lg_stage_main(argc, argv, &def);
}
