/* See keeper_table.h. */
#include "shm/keeper_table.h"
#include "base/clock.h"
#include "base/log.h"
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RETRY_MS = 20, LOOK_MS = 250 };
#define CONFIRM_NS_MAX (3 * LG_S_NS)

int lg_table_open(struct lg_keeper_table *t, bool stored)
{
    *t = (struct lg_keeper_table){.stored = stored, .barrier = -1, .store.socket = -1};
    if (stored) LG_TRY(lg_store_open(&t->store));
    return 0;
}

static struct lg_keeper_entry *find(struct lg_keeper_table *t, const char *name)
{
    for (int i = 0; i < t->count; i++)
        if (strcmp(t->entry[i].name, name) == 0) return &t->entry[i];
    return NULL;
}

static struct lg_keeper_entry *enter(struct lg_keeper_table *t, const char *name, uint64_t bytes,
                                     int fd)
{
    struct lg_keeper_entry *e = &t->entry[t->count++];
    *e = (struct lg_keeper_entry){.bytes = bytes, .fd = fd, .since_ns = lg_now_ns()};
    snprintf(e->name, sizeof e->name, "%s", name);
    return e;
}

static void close_fd(struct lg_keeper_entry *e)
{
    if (e->fd >= 0) close(e->fd);
    e->fd = -1;
}

static void erase(struct lg_keeper_table *t, struct lg_keeper_entry *e)
{
    close_fd(e);
    *e = t->entry[--t->count];
}

/* A second fd of a name cannot come from us; which of the two is meant nobody knows. */
static void take(void *arg, const char *name, uint64_t bytes, int fd)
{
    struct lg_keeper_table *t = arg;
    if (t->count < LG_KEEPER_REGIONS_MAX && !find(t, name)) {
        enter(t, name, bytes, fd);
        return;
    }
    lg_log(LG_WARN, "the service manager's store has a second fd of region %s", name);
    close(fd);
}

int lg_table_reclaim(struct lg_keeper_table *t)
{
    lg_store_reclaim(take, t);
    return t->count;
}

void lg_table_close(struct lg_keeper_table *t)
{
    int behind = 0;
    for (int i = 0; i < t->count; i++) {
        behind += t->entry[i].state == LG_ENTRY_UNDROPPED;
        close_fd(&t->entry[i]);
    }
    if (behind) lg_log(LG_WARN, "%d dropped regions stay in the service manager's store", behind);
    t->count = 0;
    if (t->barrier >= 0) close(t->barrier);
    t->barrier = -1;
    lg_store_close(&t->store);
}

/* ---- questions ---- */

static int put_again(struct lg_keeper_table *t, struct lg_keeper_entry *e)
{
    if (e->state == LG_ENTRY_UNSENT || e->state == LG_ENTRY_SENT) return LG_TABLE_LATER;
    int code = e->state == LG_ENTRY_KEPT ? 0 : e->code;
    e->asker = NULL;
    if (e->state == LG_ENTRY_FAILED) erase(t, e);
    return code;
}

int lg_table_put(struct lg_keeper_table *t, const void *asker, const char *name, uint64_t bytes,
                 int *fd, bool late)
{
    if (!*name || (t->stored && !lg_store_fits(name))) return LG_ERR_USAGE;
    struct lg_keeper_entry *e = find(t, name);
    if (e && e->asker == asker) return put_again(t, e);
    if (*fd < 0) return LG_ERR_USAGE;
    if (e && e->state == LG_ENTRY_KEPT) return LG_ERR_BUSY;
    if (e) return late ? LG_ERR_TIMEOUT : LG_TABLE_LATER;
    if (t->count == LG_KEEPER_REGIONS_MAX) return LG_ERR_NOSPACE;
    e = enter(t, name, bytes, *fd);
    *fd = -1;
    if (!t->stored) return 0;
    e->state = LG_ENTRY_UNSENT;
    e->asker = asker;
    return LG_TABLE_LATER;
}

/* Here at once, in the store when it can be. */
static void let_go(struct lg_keeper_table *t, struct lg_keeper_entry *e)
{
    if (!t->stored) {
        erase(t, e);
        return;
    }
    close_fd(e);
    e->state = LG_ENTRY_UNDROPPED;
}

static int drop_all(struct lg_keeper_table *t, bool late)
{
    for (int i = t->count - 1; i >= 0; i--)
        if (t->entry[i].state == LG_ENTRY_KEPT) let_go(t, &t->entry[i]);
    return t->count == 0 || late || t->unreachable ? 0 : LG_TABLE_LATER;
}

int lg_table_drop(struct lg_keeper_table *t, const char *name, bool late)
{
    if (!*name) return drop_all(t, late);
    struct lg_keeper_entry *e = find(t, name);
    if (e && e->state == LG_ENTRY_KEPT) {
        let_go(t, e);
        e = find(t, name);
    }
    return !e || late || (t->unreachable && e->state == LG_ENTRY_UNDROPPED) ? 0 : LG_TABLE_LATER;
}

const struct lg_keeper_entry *lg_table_get(const struct lg_keeper_table *t, const char *name)
{
    const struct lg_keeper_entry *e = find((struct lg_keeper_table *)t, name);
    return e && e->state == LG_ENTRY_KEPT ? e : NULL;
}

const struct lg_keeper_entry *lg_table_kth(const struct lg_keeper_table *t, int k)
{
    if (k < 0) return NULL;
    for (int i = 0; i < t->count; i++)
        if (t->entry[i].state == LG_ENTRY_KEPT && k-- == 0) return &t->entry[i];
    return NULL;
}

void lg_table_leave(struct lg_keeper_table *t, const void *asker)
{
    for (int i = 0; i < t->count; i++)
        if (t->entry[i].asker == asker) t->entry[i].asker = NULL;
}

/* ---- the store ---- */

static void confirm(struct lg_keeper_table *t)
{
    struct pollfd p = {.fd = t->barrier, .events = POLLIN};
    if (t->barrier < 0 || poll(&p, 1, 0) <= 0) return;
    close(t->barrier);
    t->barrier = -1;
    for (int i = t->count - 1; i >= 0; i--) {
        struct lg_keeper_entry *e = &t->entry[i];
        if (!e->covered) continue;
        e->covered = false;
        if (e->state == LG_ENTRY_SENT) e->state = LG_ENTRY_KEPT;
        if (e->state == LG_ENTRY_DROPPING) erase(t, e);
    }
}

/* What was not handed over is not there; of what was, it cannot be told, so it is taken out. */
static void give_up(struct lg_keeper_entry *e, int code)
{
    if (e->state == LG_ENTRY_SENT)
        lg_log(LG_WARN, "the service manager does not confirm region %s", e->name);
    e->state = e->state == LG_ENTRY_SENT ? LG_ENTRY_UNDROPPED : LG_ENTRY_FAILED;
    e->covered = false;
    e->code = code;
    close_fd(e);
}

static void time_out(struct lg_keeper_table *t)
{
    int64_t now_ns = lg_now_ns();
    for (int i = t->count - 1; i >= 0; i--) {
        struct lg_keeper_entry *e = &t->entry[i];
        bool waits = e->state == LG_ENTRY_UNSENT || e->state == LG_ENTRY_SENT;
        if (waits && now_ns - e->since_ns > CONFIRM_NS_MAX) give_up(e, LG_ERR_TIMEOUT);
        if (e->state == LG_ENTRY_FAILED && !e->asker) erase(t, e);
    }
}

/* false: the manager takes nothing more now. */
static bool hand_over(struct lg_keeper_table *t, struct lg_keeper_entry *e)
{
    bool put = e->state == LG_ENTRY_UNSENT;
    int rc = put ? lg_store_put(&t->store, e->name, e->bytes, e->fd)
                 : lg_store_drop(&t->store, e->name, e->bytes);
    if (rc == LG_ERR_BUSY) return false;
    if (rc < 0) {
        if (!t->unreachable) lg_log_error("the store does not follow");
        lg_err_clear();
        t->unreachable = true;
        if (put) give_up(e, rc);
        return put;
    }
    t->unreachable = false;
    e->state = put ? LG_ENTRY_SENT : LG_ENTRY_DROPPING;
    e->covered = false;
    return true;
}

static void ask_for_confirmation(struct lg_keeper_table *t)
{
    bool needed = false;
    for (int i = 0; i < t->count; i++)
        needed |= t->entry[i].state == LG_ENTRY_SENT || t->entry[i].state == LG_ENTRY_DROPPING;
    if (!needed || t->barrier >= 0) return;
    if (lg_store_barrier(&t->store, &t->barrier) < 0) {
        lg_err_clear(); /* in a moment again */
        return;
    }
    for (int i = 0; i < t->count; i++)
        t->entry[i].covered =
            t->entry[i].state == LG_ENTRY_SENT || t->entry[i].state == LG_ENTRY_DROPPING;
}

void lg_table_turn(struct lg_keeper_table *t)
{
    if (!t->stored) return;
    confirm(t);
    time_out(t);
    if (*t->ready && lg_store_ready(&t->store, t->ready) != LG_ERR_BUSY) *t->ready = 0;
    lg_err_clear();
    for (int i = 0; i < t->count; i++) {
        struct lg_keeper_entry *e = &t->entry[i];
        if ((e->state == LG_ENTRY_UNSENT || e->state == LG_ENTRY_UNDROPPED) && !hand_over(t, e))
            break;
    }
    ask_for_confirmation(t);
}

int lg_table_wait_ms(const struct lg_keeper_table *t)
{
    int wait_ms = *t->ready ? RETRY_MS : -1;
    for (int i = 0; i < t->count; i++) {
        bool told = t->entry[i].state == LG_ENTRY_SENT || t->entry[i].state == LG_ENTRY_DROPPING;
        if (t->entry[i].state == LG_ENTRY_KEPT) continue;
        if (!told || t->barrier < 0) return t->unreachable ? LOOK_MS : RETRY_MS;
        wait_ms = wait_ms < 0 ? LOOK_MS : wait_ms;
    }
    return wait_ms;
}
