/* What other hosts ask of this one (question.h). The cluster's thread hears and answers; texts are made by a worker, since
 * files are read for them; orders are taken by the supervisor's loop, which says when one is carried out. What is more
 * than a few of either at once is refused. */
#pragma once
#include "supervisor/hosts/question.h"

enum { LG_ANSWERS_JOBS_MAX = 8, LG_ANSWERS_ORDERS_MAX = 8 };

/* Allocated with malloc; the asker gets LG_ANSWER_TEXT_MAX bytes of it at most. */
struct lg_reply {
    char *text;
    size_t bytes;
    bool more;
};
/* status, json, top, logs, by one thread, which is not the loop's. An error's text becomes the answer. */
struct lg_answerer {
    int (*answer)(void *context, const struct lg_question *q, struct lg_reply *ret);
    void *context;
};

struct lg_answers_spec {
    struct lg_answerer answerer; /* answer NULL: nothing is answered */
    uint64_t lineage;
    int wake_fd; /* raised when a text is ready */
};
typedef struct lg_answers lg_answers;
int lg_answers_open(const struct lg_answers_spec *spec, lg_answers **ret);
void lg_answers_close(lg_answers **a);

/* A message that is no beat, from the channel's sender; what makes no sense is dropped. own: who answers, by place, host,
 * phase and leads. */
void lg_answers_hear(lg_answers *a, lg_channel *c, const struct lg_answer *own, const void *message,
                     size_t bytes);
/* Again and again: sends what is ready, and of orders that they are under way. */
void lg_answers_turn(lg_answers *a, lg_channel *c, const struct lg_answer *own, int64_t now_ns);

/* The loop, under the cluster's lock. An order that nobody has taken yet; false: none. ret_order: its name. */
bool lg_answers_take_order(lg_answers *a, struct lg_question *ret, uint64_t *ret_order);
void lg_answers_end_order(lg_answers *a, uint64_t order, int code, const char *text);
