/* An exchanger from inside: exchanger.c keeps connections and notes, exchanger_take.c asks and adds, exchanger_answer.c
 * answers. */
#pragma once
#include "stages/exchange/exchanger.h"

struct lg_stretch {
    size_t first, count; /* elements of the shard */
    size_t at;           /* element of the part, in `parts` */
};

typedef enum lg_ask_kind { LG_ASK_PART, LG_ASK_TOTAL, LG_ASK_STATE, LG_ASK_KINDS } lg_ask_kind;
typedef enum lg_note_kind { LG_NOTE_HELLO, LG_NOTE_CARD, LG_NOTE_ASK } lg_note_kind;

enum { LG_NOTE_MAGIC = 0x6c676e31 };

struct lg_note {
    uint32_t magic, kind; /* lg_note_kind */
    uint64_t epoch;
    uint32_t host, rank; /* who says it */
    uint64_t life;       /* of its process */
    uint64_t session;    /* of its connection to us; another one: what it was sending is lost */
    uint64_t hears;      /* the session of our connection to it that it hears; 0: none any more */
    union {
        struct lg_host_said said;
        struct lg_ask {
            uint64_t id; /* never 0; the answer's tags are id << 16 | number of the message */
            uint64_t step;
            uint32_t kind, index; /* lg_ask_kind; index: of STATE */
        } ask;
    } of;
};

/* Messages of an answer; the longest one has `most` of them. */
struct lg_answer {
    struct lg_ask asked, ask; /* the newest; that which is being answered: id 0: nothing */
    struct lg_transfer *message;
    int n, next; /* of the answer; the first one that is not sent */
};

/* What is asked of a peer. */
struct lg_question {
    struct lg_ask ask; /* id 0: nothing */
    bool sent;         /* in the present session */
    struct lg_transfer *message;
    int n;
};

struct lg_peer {
    bool is_member, connected, greeted;
    int64_t retry_ns;       /* when to connect again */
    int64_t repeat_ns;      /* when to say everything again */
    uint64_t life, session; /* its own, as it says; 0: not heard */
    int64_t heard_ns;       /* when its last note came */
    uint64_t my_session;
    bool is_heard;        /* by it, in my_session, as it says */
    int64_t connected_ns; /* since when it is not heard */
    int patience_ms;      /* after which it counts as lost */
    uint64_t card_sent;   /* number of the card that it has */
    struct lg_question question[LG_ASK_KINDS];
    struct lg_answer answer[LG_ASK_KINDS];
    float *parts; // (own part): what it sends for PART
    struct lg_loss_sum loss;
    char *state; // (message_bytes): for STATE, asked or answered
};

enum { LG_NOTES = 64 };

struct lg_exchanger {
    struct lg_exchanger_spec spec;
    lg_transport *transport;
    int hosts, me;
    size_t slice;   /* elements */
    uint64_t epoch; /* that it has entered; 0: none */
    struct lg_hosts_record record;
    struct lg_peer *peer; /* (hosts) */
    struct {
        struct lg_note note;
        struct lg_transfer transfer;
        int peer;
    } out[LG_NOTES], in[LG_NOTES];
    int next_note; /* of `in`: the next that will come */
    struct lg_host_said said;
    uint64_t card;       /* number of `said`; 0: none in this epoch */
    lg_mark taking;      /* the step whose questions are asked */
    int added;           /* messages of the own part that are added */
    uint64_t fetched_to; /* pieces of the state that are here */
    struct lg_loss_sum own_loss;
    uint64_t random;
    int64_t stuck_ns; /* since when a place is not given back */
    bool has_cut_off; /* since then */
};

/* exchanger.c */
uint64_t lg_exchanger_random(lg_exchanger *x);
/* Messages of a host's part, and what message i of it holds. */
int lg_exchanger_messages(const lg_exchanger *x, int host);
struct lg_stretch lg_exchanger_message(const lg_exchanger *x, int host, int i);
/* Has the own rank's sum of step s, from that element on, left it? 1, 0, or LG_ERR_CORRUPT. */
int lg_exchanger_has_left(const lg_exchanger *x, uint64_t step, size_t from);
/* Pieces of a state, each one message, and the bytes that one of them is. */
uint64_t lg_exchanger_state_pieces(const lg_exchanger *x, uint64_t state);
struct lg_exchanger_state lg_exchanger_state_piece(const lg_exchanger *x, uint64_t state,
                                                   uint64_t i);
bool lg_exchanger_send_note(lg_exchanger *x, int peer, const struct lg_note *note);
static inline bool lg_transfer_is_free(const struct lg_transfer *m)
{
    return !m->posted || m->done;
}

/* exchanger_take.c: 1, 0, or an error. */
int lg_exchanger_take(lg_exchanger *x, const char **ret_why);
/* Places are given back, as far as that can be, and asked for again under another number. */
void lg_exchanger_ask_again(lg_exchanger *x, int peer);
/* Has every place of a question that is dropped been given back? */
bool lg_exchanger_is_free(const lg_exchanger *x, int peer);
void lg_exchanger_drop_questions(lg_exchanger *x, int peer);

/* exchanger_answer.c */
void lg_exchanger_asked(lg_exchanger *x, int peer, const struct lg_ask *ask);
int lg_exchanger_answer(lg_exchanger *x);
void lg_exchanger_drop_answers(lg_exchanger *x, int peer);
