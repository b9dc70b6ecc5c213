/* Which hosts take part: who is there, who is lost, which epoch there is, as pure functions of what was heard and of
 * the time. Sockets, files, threads and the board are their callers' matter (cluster.h); the simulation
 * (tests/unit/test_sim_group.c) calls the very same.
 *
 * A *place* is a machine of hosts.list, from 0; a *number* is a host of the run (shm/hosts.h), which a place holds. The
 * first hosts.count places begin with their own numbers, the others are spares. A *life* is one start of a place: the
 * time of it, so that a later one is the greater (where the clock was set back, a time after the last one that others know
 * of; where it heard nobody who knew, the members' epoch says which life it has, to who waits to join). A supervisor that dies
 * and is followed by another one on the same board keeps its life.
 *
 * Everybody says everything that it knows to everybody, over and over, in one message, the *beat*: what is lost was said
 * again, and what comes late or twice is older than what is known, and dropped. Each beat echoes when the last one of
 * every other place was sent. A place is *up* as long as its beats come, and with them echoes of ours that are not old:
 * so one whom we hear, and who does not hear us, is not. A supervisor that follows on another one has a silence's time to
 * hear the others, in which it neither calls them lost nor is called so itself. Times are compared with those of the same machine alone.
 *
 * How an epoch is made:
 *
 *   the first    by place 0, when all of the first hosts.count places are up, know no epoch and are alike (plan, lineage,
 *                build, hosts.shared, max_steps). Its life is the name of the formation.
 *   the next     proposed by the member with the lowest number among those that are up for it: without the members that
 *                are not up; or, when the epoch has come to rest in a state (lg_hosts_settled), with one that comes. It
 *                counts when it is decided, and only one successor of an epoch is ever decided:
 *                  hosts.shared   by whoever makes the file of that number, with link()
 *                  otherwise      by more than half of the epoch's members, as in L. Lamport, "Paxos made simple" (2001):
 *                                 the single value that is agreed on is the successor of this epoch. What a member has
 *                                 promised and accepted outlives its supervisor (`voted`, on the board), and with its
 *                                 board goes its life, which is what was a member
 *                or by the operator (lg_group_take), who then answers for it that the others do not go on
 *
 * An epoch that somebody else has made is obeyed. A member that is not in it has lost: it says so and stops. One that
 * finds no majority and no shared folder waits, with all of its processes, and so loses nothing when the others come
 * back: no step is made without all members. */
#pragma once
#include "config/data_set.h"
#include "shm/hosts.h"

enum { LG_PLACES_MAX = 64, LG_GROUP_TEXT = 200 };
#define LG_GROUP_AWAITED (INT64_MAX / 2) /* later than any beat was sent */

/* An epoch as it is agreed on. */
struct lg_epoch {
    uint64_t formation, number; /* number 0: none */
    uint64_t first_step;        /* with which the formation began */
    uint64_t members;           /* bit h: host number h */
    int32_t leader;
    uint8_t place[LG_HOSTS_MAX]; /* of the members, 0 of others */
    uint64_t life[LG_HOSTS_MAX];
};

#define LG_GROUP_PHASES(X)                                                                                   \
    X(joining) /* has no number */                                                                           \
    X(coming)  /* has taken what was offered: its board is made for that state */                            \
    X(member)                                                                                                \
    X(done) /* a member that has nothing left to do: its silence is no loss for LONELY_SILENCES (group.c) */ \
    X(lost) /* is in no epoch any more, and ends */
typedef enum lg_group_phase {
#define X(name) LG_GROUP_##name,
    LG_GROUP_PHASES(X)
#undef X
        LG_GROUP_PHASE_COUNT
} lg_group_phase;

/* What must be the same on all hosts. */
struct lg_identity {
    uint64_t plan, lineage, build;
    uint64_t shared;    /* which folder hosts.shared is (shared.h); 0: none, or not known */
    uint64_t max_steps; /* where a host ends by itself: the others would wait for its next step */
};

/* What is known of the run's beginning, or of the state in which a comer joins it. */
struct lg_origin {
    uint64_t step;
    int32_t n_data;
    struct lg_data_part data[LG_DATA_PARTS_MAX];
};

/* What a place says. Host byte order: all hosts run the same build. */
struct lg_beat {
    int32_t place;
    uint32_t phase; /* lg_group_phase */
    uint64_t life;
    int64_t sent_ns; /* on its own clock */
    /* The last beat of each; LG_GROUP_AWAITED: there was no time to hear one (lg_group_restore). */
    struct {
        uint64_t life;
        int64_t sent_ns;
    } heard[LG_PLACES_MAX];
    struct lg_identity identity;
    struct lg_origin origin;             /* joining: what it would go on from */
    char address[LG_HOST_ADDRESS_BYTES]; /* of its exchange processes */
    int32_t number;                      /* coming, member, done: which host it is; -1 */
    uint64_t state;                      /* coming: for which its board is made */
    uint32_t has_state, comes;           /* has one; its first one is another's */
    struct lg_epoch epoch;               /* the newest that it knows */
    /* to somebody who comes; life 0: nobody */
    struct {
        uint64_t life;
        int32_t number;
        struct lg_origin origin;
    } offer;
    /* about the successor of `epoch` */
    uint64_t ballot;          /* asks for promises; 0: not */
    struct lg_epoch proposal; /* asks for acceptance under `ballot`; number 0: not yet */
    uint64_t promised, accepted;
    struct lg_epoch accepted_epoch;
};

struct lg_group_setup {
    int place, places, count; /* own place; all of them, spares included; hosts of the run */
    uint64_t life;
    int64_t silence_ns;
    bool shared; /* there is hosts.shared */
    struct lg_identity identity;
    struct lg_origin origin;
    char address[LG_HOST_ADDRESS_BYTES];
};

/* What the board says. */
struct lg_group_facts {
    bool has_state;
    bool settled; /* lg_hosts_settled: in this state, with this data set */
    struct lg_origin rest;
};

enum lg_group_news {
    LG_GROUP_ENTERED = 1, /* own.epoch is another: it goes onto the board */
    LG_GROUP_LOST = 2,    /* `text` says why */
    LG_GROUP_LINK = 4,    /* `linking` is to be made a file: lg_group_linked says what came of it */
    LG_GROUP_VOTED = 8, /* own.promised, own.accepted: onto the board, before the next beat goes */
    LG_GROUP_REFUSED = 16, /* joining: the others are not alike, `text` says in what */
    LG_GROUP_ENDED = 32,   /* joining: the run that it waited for has ended */
    LG_GROUP_OFFERED = 64, /* a number, to somebody who waits for it: worth a beat at once */
};

struct lg_group {
    struct lg_group_setup setup;
    struct lg_beat own;
    struct lg_beat last[LG_PLACES_MAX]; /* life 0: never heard */
    int64_t heard_ns[LG_PLACES_MAX];    /* on our clock */
    int64_t restored_ns;                /* likewise, when is_restored */
    bool is_restored;
    struct lg_group_facts facts;
    struct lg_epoch linking; /* number 0: none under way */
    bool link_waits;
    int64_t ballot_ns;
    int64_t company_ns;   /* joining, coming: when a member was up last; 0: never */
    uint64_t company;     /* of which formation it was */
    uint64_t comes_to;    /* coming: for which formation its board is made */
    int64_t done_sent_ns; /* of the first beat that said so; 0: none yet */
    bool quorum_missing;  /* members are lost, and what is left may not decide: for people */
    bool done;
    bool has_twin; /* joining: another machine says that it is this place */
    char text[LG_GROUP_TEXT];
};

void lg_group_init(struct lg_group *g, const struct lg_group_setup *setup);
/* Of a board whose former supervisor has died: its epoch and votes. The members of the epoch count as present for one
 * silence from now_ns on, until they are heard. */
struct lg_group_before {
    struct lg_epoch epoch;
    int number;
    bool comes;
    uint64_t start_step, promised, accepted;
    struct lg_epoch accepted_epoch;
};
void lg_group_restore(struct lg_group *g, const struct lg_group_before *b, int64_t now_ns);
/* A beat came. False: it makes no sense (dropped). */
bool lg_group_hear(struct lg_group *g, const struct lg_beat *b, int64_t now_ns);
/* What follows from all that is known. Returns lg_group_news, OR-ed. */
unsigned lg_group_look(struct lg_group *g, const struct lg_group_facts *facts, int64_t now_ns);
/* What to say now. */
const struct lg_beat *lg_group_beat(struct lg_group *g, int64_t now_ns);
/* The file of that number says this; NULL: it could be neither made nor read, and is tried again. */
unsigned lg_group_linked(struct lg_group *g, const struct lg_epoch *e);
/* The operator's word: the members that are up are the epoch. LG_ERR_FAILED, without a trace: none is lost, or this
 * host is in no epoch. */
int lg_group_take(struct lg_group *g, int64_t now_ns, unsigned *ret_news);
/* Joining: has something been offered, or an epoch been entered (*ret_number its host)? */
bool lg_group_place(const struct lg_group *g, int *ret_number, struct lg_origin *ret,
                    bool *ret_comes);
/* The board is made for what lg_group_place said. */
void lg_group_come(struct lg_group *g, int number, uint64_t state);
/* Nothing is left to do here. True: the others are as far, those who wait to be one of the run know, or they are gone. */
void lg_group_finish(struct lg_group *g);
bool lg_group_is_finished(const struct lg_group *g, int64_t now_ns);
bool lg_group_is_up(const struct lg_group *g, int place, int64_t now_ns);
const char *lg_group_phase_name(lg_group_phase p);
