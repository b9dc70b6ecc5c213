#include "tests/chaos/chaos.h"
int chaos_report(const char *path, char *const *homes, int n_homes)
{
    return 0;
}
