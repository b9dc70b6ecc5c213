/* See late.h. */
#include "tests/stub/late.h"
#include "base/check.h"
#include <stdlib.h>
#include <string.h>

struct queue;
struct item {
    enum { OP, UPLOAD, DOWNLOAD, COPY, ZERO, WAIT } kind;
    lg_op_id op;
    void *args; /* of an operation */
    void *to;
    const void *from;
    size_t bytes;
    struct queue *other; /* WAIT: for so much of it */
    uint64_t until;
};

/* Work of a stream; item i lies at item[i - first]. */
struct queue {
    lg_stream *stream;
    struct item *item;
    uint64_t first, done, n;
    size_t cap;
    struct queue *next;
};

struct late_event {
    lg_event base;
    struct queue *of; /* NULL: never recorded */
    uint64_t at;
};

static lg_device g_host; /* its functions, before */
static struct lg_ops g_ops, g_late_ops;
static struct queue *g_queues;

static struct queue *queue_of(lg_stream *s)
{
    for (struct queue *q = g_queues; q; q = q->next)
        if (q->stream == s) return q;
    struct queue *q = calloc(1, sizeof *q);
    LG_ASSERT(q);
    q->stream = s;
    q->next = g_queues;
    return g_queues = q;
}

static void add(lg_stream *s, struct item item)
{
    struct queue *q = queue_of(s);
    if (q->done == q->n) q->first = q->n; /* nothing waits: begin anew */
    if (q->n - q->first == q->cap) {
        q->cap = q->cap ? 2 * q->cap : 64;
        q->item = realloc(q->item, q->cap * sizeof *q->item);
        LG_ASSERT(q->item);
    }
    q->item[q->n++ - q->first] = item;
}

static void call(lg_stream *s, lg_op_id op, const void *args)
{
    switch (op) {
#define LG_OP(name, ...)                                                                           \
    case LG_OP_##name:                                                                             \
        g_ops.name(s, args);                                                                       \
        return;
#include "kernels/ops.def"
#undef LG_OP
    default:
        LG_ASSERT(op < LG_OP_COUNT);
    }
}

static void run(struct queue *q, uint64_t until)
{
    LG_ASSERT(until <= q->n);
    while (q->done < until) {
        const struct item i = q->item[q->done++ - q->first];
        switch (i.kind) {
        case OP:
            call(q->stream, i.op, i.args);
            free(i.args);
            break;
        case UPLOAD:
            g_host.upload(q->stream, i.to, i.from, i.bytes);
            break;
        case DOWNLOAD:
            g_host.download(q->stream, i.to, i.from, i.bytes);
            break;
        case COPY:
            g_host.copy(q->stream, i.to, i.from, i.bytes);
            break;
        case ZERO:
            g_host.zero(q->stream, i.to, i.bytes);
            break;
        case WAIT:
            if (i.other) run(i.other, i.until);
            break;
        }
    }
}

static void run_all(void)
{
    for (struct queue *q = g_queues; q; q = q->next) run(q, q->n);
}

#define LG_OP(name, ...)                                                                           \
    static void late_##name(lg_stream *s, const struct lg_##name##_args *a)                        \
    {                                                                                              \
        void *args = malloc(sizeof *a);                                                            \
        LG_ASSERT(args);                                                                           \
        memcpy(args, a, sizeof *a);                                                                \
        add(s, (struct item){.kind = OP, .op = LG_OP_##name, .args = args});                       \
    }
#include "kernels/ops.def"
#undef LG_OP

static void late_upload(lg_stream *s, void *to, const void *from, size_t bytes)
{
    add(s, (struct item){.kind = UPLOAD, .to = to, .from = from, .bytes = bytes});
}

static void late_download(lg_stream *s, void *to, const void *from, size_t bytes)
{
    add(s, (struct item){.kind = DOWNLOAD, .to = to, .from = from, .bytes = bytes});
}

static void late_copy(lg_stream *s, void *to, const void *from, size_t bytes)
{
    add(s, (struct item){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}

static void late_zero(lg_stream *s, void *to, size_t bytes)
{
    add(s, (struct item){.kind = ZERO, .to = to, .bytes = bytes});
}

static void late_sync(lg_stream *s)
{
    struct queue *q = queue_of(s);
    run(q, q->n);
}

/* Its queue stays, empty: events may still speak of it. */
static void late_stream_close(lg_stream *s)
{
    struct queue *q = queue_of(s);
    run(q, q->n);
    q->stream = NULL;
    g_host.stream_close(s);
}

static int late_event_open(lg_device *d, lg_event **ret)
{
    struct late_event *e = calloc(1, sizeof *e);
    LG_ASSERT(e);
    *ret = &e->base;
    return 0;
}

static void late_event_close(lg_event *e)
{
    free(e);
}

static void late_record(lg_stream *s, lg_event *event)
{
    struct late_event *e = (struct late_event *)event;
    e->of = queue_of(s);
    e->at = e->of->n;
}

static void late_wait(lg_stream *s, lg_event *event)
{
    const struct late_event *e = (const struct late_event *)event;
    add(s, (struct item){.kind = WAIT, .other = e->of, .until = e->at});
}

static void late_event_sync(lg_event *event)
{
    const struct late_event *e = (const struct late_event *)event;
    if (e->of) run(e->of, e->at);
}

static void late_free(lg_device *d, void *p)
{
    run_all();
    g_host.free(d, p);
}

static void late_unmap(lg_device *d, void *at, size_t bytes)
{
    run_all();
    g_host.unmap(d, at, bytes);
}

static void late_unpin(lg_device *d, void *at)
{
    run_all();
    if (g_host.unpin) g_host.unpin(d, at);
}

void late_device(lg_device *d)
{
    g_host = *d;
    g_ops = *d->ops;
#define LG_OP(name, ...) g_late_ops.name = late_##name;
#include "kernels/ops.def"
#undef LG_OP
    d->ops = &g_late_ops;
    d->upload = late_upload;
    d->download = late_download;
    d->copy = late_copy;
    d->zero = late_zero;
    d->sync = late_sync;
    d->stream_close = late_stream_close;
    d->event_open = late_event_open;
    d->event_close = late_event_close;
    d->record = late_record;
    d->wait = late_wait;
    d->event_sync = late_event_sync;
    d->free = late_free;
    d->unmap = late_unmap;
    d->unpin = late_unpin;
}
