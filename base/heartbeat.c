#include "base/heartbeat.h"
#include <stddef.h>

static _Thread_local struct {
    void (*beat)(void *arg);
    void *arg;
} g_hook;

void lg_heartbeat_set(void (*beat)(void *arg), void *arg)
{
    g_hook.beat = beat;
    g_hook.arg = arg;
}

void lg_heartbeat(void)
{
    if (g_hook.beat) g_hook.beat(g_hook.arg);
}
