/* What this build's programs and backends agree on, as text: a hash of the headers between them, made in
 * kernels.mk. It is compiled into both, so that a backend of another build is refused when it is opened
 * and not when a struct has grown a field. */
#include "kernels/backend.h"
#include "kernels/info.h"

__attribute__((visibility("default"))) const char *lg_backend_interface(void)
{
    return LG_INTERFACE;
}
