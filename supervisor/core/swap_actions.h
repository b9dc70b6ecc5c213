/* The inside of a swap, shared by swap.c (orders, looks, the table) and swap_actions.c (what is done);
 * its states and events: states.def. */
#pragma once
#include "supervisor/core/swap.h"

#define LG_SWAP_STATES(X) X(starting) X(preparing) X(recording) X(handing) X(over) X(closed)
#define LG_SWAP_EVENTS(X)                                                                          \
    X(started)                                                                                     \
    X(refused)                                                                                     \
    X(all_ready)                                                                                   \
    X(late) X(died) X(recorded) X(unrecorded) X(settled) X(relapsed) X(run_ends) X(all_gone)

typedef enum lg_swap_state {
#define X(name) LG_SWAP_##name,
    LG_SWAP_STATES(X)
#undef X
        LG_SWAP_STATE_COUNT
} lg_swap_state;

typedef enum lg_swap_event {
#define X(name) LG_SWAP_EVENT_##name,
    LG_SWAP_EVENTS(X)
#undef X
        LG_SWAP_EVENT_COUNT
} lg_swap_event;

struct lg_standby {
    int index;                  /* of the instance that it is to become */
    lg_incarnation incarnation; /* in the spare row */
    lg_incarnation became;      /* in the instance's row; 0: not yet */
    struct lg_child child;      /* until then */
};

struct lg_swap {
    uint64_t id; /* which of this lgsup's */
    lg_role role;
    char program[LG_PATH_BYTES];
    char what[48]; /* "vae.1" or "trainer", for people */
    struct lg_peer peer;
    lg_swap_state state;
    int64_t start_ns;
    char said[LG_CAUSE_BYTES]; /* the last error event of a standby */
    int fault;                 /* with an event that ends the swap: the error ... */
    char why[320];             /* ... and its words */
    int code;                  /* over: what is answered */
    bool reverting;            /* over: DIR/programs is being written back */
    char text[LG_MESSAGE_TEXT_MAX + 1];
    struct lg_standby standby[LG_INSTANCES_MAX];
    int n;
};

void lg_swap_raise(lg_supervisor *s, lg_swap_event e);
/* DIR/logs/vae.1.next.log */
int lg_swap_log(const lg_supervisor *s, int index, char ret[LG_PATH_BYTES]);
void lg_swap_answer(lg_supervisor *s, const struct lg_peer *peer, int code, const char *text);

#define LG_SWAP_RULE(state, event, action, next) void lg_swap_##action(lg_supervisor *s);
#include "supervisor/core/states.def"
#undef LG_SWAP_RULE
