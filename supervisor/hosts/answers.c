/* What other hosts ask; see answers.h. */
#include "supervisor/hosts/answers.h"
#include "base/clock.h"
#include "shm/board.h"
#include "supervisor/run/worker.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNDER_WAY_MS = 1000, PATIENCE_MS = 2000, ORDER_TEXT_BYTES = 512 };

struct order {
    uint64_t name; /* 0: none */
    struct lg_channel_peer peer;
    struct lg_question q;
    bool taken, ended;
    int code;
    char text[ORDER_TEXT_BYTES];
    int64_t next_ns;
};

struct lg_answers {
    struct lg_answers_spec spec;
    lg_worker *worker;
    lg_channel *channel;   /* during a turn */
    struct lg_answer own;  /* likewise */
    unsigned char *buffer; /* (LG_ANSWER_BYTES_MAX) */
    struct order order[LG_ANSWERS_ORDERS_MAX];
    uint64_t last_order;
};

int lg_answers_open(const struct lg_answers_spec *spec, lg_answers **ret)
{
    lg_answers *a = calloc(1, sizeof *a);
    if (!a) return LG_FAIL(LG_ERR_NOSPACE, "no memory for answers");
    a->spec = *spec;
    a->buffer = malloc(LG_ANSWER_BYTES_MAX);
    int rc = a->buffer ? lg_worker_open(&(struct lg_worker_spec){.name = "lg-answers",
                                                                 .jobs_max = LG_ANSWERS_JOBS_MAX,
                                                                 .wake_fd = spec->wake_fd},
                                        &a->worker)
                       : LG_FAIL(LG_ERR_NOSPACE, "no memory for answers");
    if (rc < 0) {
        lg_answers_close(&a);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = a;
    return 0;
}

void lg_answers_close(lg_answers **pa)
{
    lg_answers *a = *pa;
    *pa = NULL;
    if (!a) return;
    if (a->worker) lg_worker_close(&a->worker, PATIENCE_MS);
    free(a->buffer);
    free(a);
}

struct said {
    int code;
    bool under_way, more;
    const char *text;
    size_t bytes;
};

static void say(lg_answers *a, lg_channel *c, const struct lg_channel_peer *to, uint64_t id,
                const struct said *s)
{
    struct lg_answer h = a->own;
    h.magic = LG_ANSWER_MAGIC;
    h.id = id;
    h.code = s->code;
    h.under_way = s->under_way;
    h.more = s->more;
    h.bytes = (uint32_t)LG_MIN(s->bytes, (size_t)LG_ANSWER_TEXT_MAX);
    memcpy(a->buffer, &h, sizeof h);
    if (h.bytes) memcpy(a->buffer + sizeof h, s->text, h.bytes);
    lg_channel_answer(c, to, a->buffer, sizeof h + h.bytes);
}

static void say_text(lg_answers *a, lg_channel *c, const struct lg_channel_peer *to, uint64_t id,
                     int code, const char *text)
{
    say(a, c, to, id, &(struct said){.code = code, .text = text, .bytes = strlen(text)});
}

/* ---- texts ---- */

struct text_job {
    struct lg_job job;
    struct lg_answerer answerer;
    struct lg_channel_peer peer;
    struct lg_question q;
    struct lg_reply reply;
    int code;
    char why[ORDER_TEXT_BYTES];
};

static void make_text(struct lg_job *job)
{
    struct text_job *j = (struct text_job *)job;
    j->code = j->answerer.answer(j->answerer.context, &j->q, &j->reply);
    if (j->code < 0) snprintf(j->why, sizeof j->why, "%s", lg_err_message());
    lg_err_clear();
}

static void text_made(struct lg_job *job, void *context)
{
    struct text_job *j = (struct text_job *)job;
    lg_answers *a = context;
    if (j->code < 0)
        say_text(a, a->channel, &j->peer, j->q.id, j->code, j->why);
    else
        say(a, a->channel, &j->peer, j->q.id,
            &(struct said){.more = j->reply.more, .text = j->reply.text, .bytes = j->reply.bytes});
}

static void release_text(struct lg_job *job)
{
    struct text_job *j = (struct text_job *)job;
    free(j->reply.text);
    free(j);
}

static void give_text(lg_answers *a, lg_channel *c, const struct lg_channel_peer *to,
                      const struct lg_question *q)
{
    struct text_job *j = calloc(1, sizeof *j);
    LG_ASSERT(j);
    j->job = (struct lg_job){.work = make_text, .done = text_made, .release = release_text};
    j->answerer = a->spec.answerer;
    j->peer = *to;
    j->q = *q;
    if (!lg_worker_give(a->worker, &j->job))
        say_text(a, c, to, q->id, LG_ERR_BUSY, "too many ask at once: try again");
}

/* ---- orders ---- */

static void give_order(lg_answers *a, lg_channel *c, const struct lg_channel_peer *to,
                       const struct lg_question *q)
{
    for (int i = 0; i < LG_ANSWERS_ORDERS_MAX; i++) {
        struct order *o = &a->order[i];
        if (o->name) continue;
        *o = (struct order){.name = ++a->last_order, .peer = *to, .q = *q};
        return;
    }
    say_text(a, c, to, q->id, LG_ERR_BUSY, "too many orders are under way: try again");
}

bool lg_answers_take_order(lg_answers *a, struct lg_question *ret, uint64_t *ret_order)
{
    for (int i = 0; i < LG_ANSWERS_ORDERS_MAX; i++) {
        struct order *o = &a->order[i];
        if (!o->name || o->taken) continue;
        o->taken = true;
        *ret = o->q;
        *ret_order = o->name;
        return true;
    }
    return false;
}

void lg_answers_end_order(lg_answers *a, uint64_t order, int code, const char *text)
{
    for (int i = 0; i < LG_ANSWERS_ORDERS_MAX; i++) {
        struct order *o = &a->order[i];
        if (o->name != order || o->ended) continue;
        o->ended = true;
        o->code = code;
        snprintf(o->text, sizeof o->text, "%s", text);
    }
}

static void look_at_order(lg_answers *a, lg_channel *c, struct order *o, int64_t now_ns)
{
    if (o->ended) {
        say_text(a, c, &o->peer, o->q.id, o->code, o->text);
        o->name = 0;
    } else if (now_ns >= o->next_ns) {
        say(a, c, &o->peer, o->q.id, &(struct said){.under_way = true});
        o->next_ns = now_ns + UNDER_WAY_MS * LG_MS_NS;
    }
}

void lg_answers_turn(lg_answers *a, lg_channel *c, const struct lg_answer *own, int64_t now_ns)
{
    a->own = *own;
    a->channel = c;
    lg_worker_collect(a->worker, a);
    for (int i = 0; i < LG_ANSWERS_ORDERS_MAX; i++)
        if (a->order[i].name) look_at_order(a, c, &a->order[i], now_ns);
}

/* ---- what comes ---- */

static bool is_sound(const struct lg_question *q)
{
    return q->magic == LG_QUESTION_MAGIC && q->kind < LG_QUESTION_KINDS &&
           q->n_files <= LG_QUESTION_FILES_MAX && memchr(q->text, 0, sizeof q->text) &&
           q->role >= 0 && q->role < LG_ROLE_COUNT && q->index >= -1 && q->index < LG_INSTANCES_MAX;
}

void lg_answers_hear(lg_answers *a, lg_channel *c, const struct lg_answer *own, const void *message,
                     size_t bytes)
{
    const struct lg_question *q = message;
    struct lg_channel_peer to;
    if (bytes != sizeof *q || !is_sound(q) || !a->spec.answerer.answer) return;
    lg_channel_sender(c, &to);
    a->own = *own;
    if (q->layout != lg_layout_hash())
        say_text(a, c, &to, q->id, LG_ERR_MISMATCH, "another build of lgsup runs there");
    else if (q->lineage != a->spec.lineage)
        say_text(a, c, &to, q->id, LG_ERR_NOTFOUND, "another run is there");
    else if (own->phase < LG_GROUP_member)
        say_text(a, c, &to, q->id, 0, "");
    else if (q->kind == LG_QUESTION_scale || q->kind == LG_QUESTION_swap)
        give_order(a, c, &to, q);
    else
        give_text(a, c, &to, q);
}
