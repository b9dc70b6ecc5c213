/* See keeper_store.h. Everything here is libsystemd's sd_notify(3) and sd_listen_fds(3).
 *
 * FDPOLL=0: a memfd or an exported GPU allocation has no end that could be polled for, and must not
 * be thrown out of the store by a guess. The barrier makes "stored" mean "survives me": the manager
 * reads notifications in order and closes the barrier's pipe when it has come to it. */
#include "shm/keeper_store.h"
#include "base/check.h"
#include "base/log.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

enum { BARRIER_US_MAX = 3000000, STORED_NAME_BYTES = LG_REGION_NAME_BYTES + 24 };

bool lg_store_fits(const char *name)
{
    if (!*name) return false;
    for (const char *c = name; *c; c++)
        if (*c <= ' ' || *c >= 127 || *c == ':' || *c == '=') return false;
    return true;
}

static int wait_until_read(const char *name)
{
    int rc = sd_notify_barrier(0, BARRIER_US_MAX);
    if (rc > 0) return 0;
    return LG_FAIL(rc == -ETIMEDOUT ? LG_ERR_TIMEOUT : LG_ERR_IO,
                   "the service manager does not confirm region %s: %s", name,
                   rc == 0 ? "NOTIFY_SOCKET is not set" : strerror(-rc));
}

int lg_store_put(const char *name, uint64_t bytes, int fd)
{
    char text[STORED_NAME_BYTES + 40];
    LG_ASSERT(lg_store_fits(name));
    snprintf(text, sizeof text, "FDSTORE=1\nFDPOLL=0\nFDNAME=%s=%" PRIu64, name, bytes);
    int rc = sd_pid_notify_with_fds(0, 0, text, &fd, 1);
    if (rc <= 0)
        return LG_FAIL(LG_ERR_IO, "cannot hand region %s to the service manager: %s", name,
                       rc == 0 ? "NOTIFY_SOCKET is not set" : strerror(-rc));
    LG_TRY(wait_until_read(name));
    return 0;
}

int lg_store_drop(const char *name, uint64_t bytes)
{
    int rc = sd_notifyf(0, "FDSTOREREMOVE=1\nFDNAME=%s=%" PRIu64, name, bytes);
    if (rc <= 0)
        return LG_FAIL(LG_ERR_IO, "cannot take region %s out of the service manager's store: %s",
                       name, rc == 0 ? "NOTIFY_SOCKET is not set" : strerror(-rc));
    LG_TRY(wait_until_read(name));
    return 0;
}

/* "NAME=BYTES"; anything else in the store is not ours. */
static bool split(char *stored, uint64_t *ret_bytes)
{
    char *bytes = strrchr(stored, '='), *end;
    if (!bytes || bytes == stored || bytes - stored >= LG_REGION_NAME_BYTES) return false;
    *bytes++ = 0;
    errno = 0;
    *ret_bytes = strtoull(bytes, &end, 10);
    return errno == 0 && end != bytes && !*end && lg_store_fits(stored);
}

int lg_store_reclaim(void (*take)(void *arg, const char *name, uint64_t bytes, int fd), void *arg)
{
    char **names = NULL;
    int taken = 0, n = sd_listen_fds_with_names(1, &names);
    for (int i = 0; i < n; i++) {
        uint64_t bytes;
        int fd = SD_LISTEN_FDS_START + i;
        if (split(names[i], &bytes)) {
            take(arg, names[i], bytes, fd);
            taken++;
        } else {
            lg_log(LG_WARN, "the service manager's store has an fd that is no region: %s",
                   names[i]);
            close(fd);
        }
        free(names[i]);
    }
    free(names);
    return taken;
}

void lg_store_ready(const char *status)
{
    sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}
