/* What is asked of the supervisor of another host, over the channel of the beats (channel.h), and what it answers. So
 * commands show and steer the whole run from any host: who asks is a command on a machine of the list that has the
 * cluster's key.
 *
 *   status, json, top   text for people, JSON, a frame of the screen: of that host alone
 *   logs                pieces of its log files behind the places that the question names
 *   scale, swap         an order, as of a command on that host; first that it is under way, every second, then how it ended
 *
 * A question has one size and an answer a largest one. Nothing is asked twice: a question that is lost is not answered,
 * and who asks waits for a limited time. Host byte order: all hosts run the same build, and who has another layout of
 * the board is told so. */
#pragma once
#include "supervisor/hosts/channel.h"

#define LG_QUESTIONS(X) X(status) X(json) X(top) X(logs) X(scale) X(swap)
typedef enum lg_question_kind {
#define X(name) LG_QUESTION_##name,
    LG_QUESTIONS(X)
#undef X
        LG_QUESTION_KINDS
} lg_question_kind;

enum { LG_QUESTION_TEXT_MAX = 512, LG_QUESTION_FILES_MAX = 700, LG_LOG_NAME_BYTES = 64 };

struct lg_question {
    uint64_t magic, layout; /* LG_QUESTION_MAGIC, lg_layout_hash() */
    uint64_t lineage;       /* of the run that is meant */
    uint64_t id;            /* the asker's, in the answer as well */
    uint32_t kind;          /* lg_question_kind */
    int32_t role, index;    /* scale, swap; index -1: all */
    int32_t number;         /* scale: instances; top: columns */
    uint32_t flag;          /* top: UTF-8; logs: more may come, whole lines alone */
    uint32_t n_files;
    char text[LG_QUESTION_TEXT_MAX]; /* swap: program; logs: role, as on the command line, or "" */
    struct {
        uint64_t name; /* lg_hash of it */
        uint64_t shown;
    } file[LG_QUESTION_FILES_MAX]; /* logs: what is known of them */
};
#define LG_QUESTION_MAGIC UINT64_C(0x316b736120676c) /* "lg ask1" */
#define LG_ANSWER_MAGIC   UINT64_C(0x31796173676c)   /* "lgsay1" */

struct lg_answer {
    uint64_t magic, id;
    int32_t place, host; /* host -1: it has no number */
    uint32_t phase;      /* lg_group_phase; below member there is no text */
    uint32_t leads;
    int32_t code;       /* 0, or the lg_err that `text` is about */
    uint32_t under_way; /* an order: another answer follows */
    uint32_t more;      /* logs: there is more of them already */
    uint32_t bytes;     /* of the text that follows this struct */
};
enum { LG_ANSWER_TEXT_MAX = LG_ANSWER_BYTES_MAX - (int)sizeof(struct lg_answer) };

/* logs: the text is pieces, each of these followed by its bytes. */
struct lg_log_piece {
    char name[LG_LOG_NAME_BYTES];
    uint64_t shown; /* of the file, with this piece */
    uint64_t bytes;
};

static_assert(sizeof(struct lg_question) <= LG_CHANNEL_BYTES, "a question fits into a message");
static_assert(sizeof(struct lg_question) != sizeof(struct lg_beat), "told apart by their sizes");
