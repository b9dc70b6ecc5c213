/* See ref64_fixture.h. */
#include "tests/unit/ref64_fixture.h"
#include "base/check.h"
#include <stdio.h>

lg_device *g_device;
lg_stream *g_stream;

int ref64_open(void **state)
{
    (void)state;
    if (lg_device_open("ref64", NULL, &g_device) < 0 || lg_stream_open(g_device, &g_stream) < 0) {
        printf("%s\n", lg_err_text());
        return -1;
    }
    return 0;
}

int ref64_close(void **state)
{
    (void)state;
    lg_stream_close(&g_stream);
    lg_device_close(&g_device);
    return 0;
}
