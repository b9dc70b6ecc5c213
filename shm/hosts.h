/* Several hosts of one run: the board's section `hosts`, and what follows from it, as pure functions like those of
 * commit.h. Each host has a board of its own; the state is replicated, so that inside a host nothing changes.
 *
 * Host h of H trains, of step s, samples [s B + h B / H, s B + (h + 1) B / H). A host numbers its own by m = s B / H + i;
 * window, claims and marks know m alone. What decides bits (items, noise, timesteps, dropout, ledger) knows n =
 * lg_host_sample(m). With H = 1 both are the same, and nothing of this header is used.
 *
 * A step on each host (commit.h has the marks of a rank):
 *
 *   REDUCE(s)    rank r: its shard, added up over the host's ranks, lies in trainer/<r>/outgoing; row.local = mark(s)
 *   exchange r   takes from every host its part of that shard, adds the parts in host order, and takes from every host
 *                the sum of the part that that one adds: trainer/<r>/incoming; row.exchanged = mark(s)
 *   TOTAL(s)     rank r: squares of the whole sum; row.partial = mark(s)
 *   UPDATE(s)    needs, beside what it needs on one host, that every host of the epoch has exchanged step s
 *
 * An *epoch* says who takes part: {number, members, leader}. Numbers grow. One is won exclusively, by the supervisors
 * (who decides it, and how, is their matter); everything here only obeys. One whose members are all H is complete. A step
 * is exchanged in a complete epoch alone; in another one the members end what all of them have exchanged:
 *
 *   After a death the survivors' epoch comes to rest at one state S (lg_hosts_settled): if all of them had exchanged step
 *   s they update, S = s + 1; else none has, and S = s. For UPDATE(s) in any epoch means that all its members, and so
 *   all survivors, have exchanged s. Then the next epoch takes in a host with that number again: its board is made for
 *   start_step S, and it takes state S from the leader (`fetched`). Nobody leaves S without it, for it must exchange S.
 *
 * Words of the section; "exchange 0" is the process lg-exchange 0 of this host:
 *
 *   count, host,     lgsup, before anybody starts; constant.
 *   comes
 *   of[e & 3], then  lgsup: an epoch's record, then its number with release. Numbers grow by 1 at least, so a record
 *   epoch            stands for three more. lgsup dying between both: nobody has seen it, it is written again.
 *                    Readers: all. A reader compares the number again (lg_hosts_epoch), as it may have been overtaken.
 *   lost             lgsup: 1: this side of a partition has no epoch any more. Nobody goes on; it never becomes 0 again.
 *   card[h]          what host h said of itself last: exchange 0, of its own host from the board, of others from their
 *                    notes. `said_in` is the epoch in which it was said; 0 while the others are being written. A card
 *                    counts only when it was said in the present epoch, since a host that comes again begins anew. Within
 *                    one epoch its words only grow, also when a card comes after a later one. Exchange 0 dying anywhere: its
 *                    successor asks all hosts again.
 *                    Readers: the ranks, lgsup.
 *   card[h].info     {voids, valid samples, hash of keys} of step s at [s & 3]: those of a step are the same whoever
 *                    computes them, so they count whatever epoch they were said in. `of` is stored last, release. Host h
 *                    says s only when it has state s - 1 at least, and nobody is further than one state from another, so
 *                    that four places are enough.
 *   heard_ns[p]      when the machine of place p was heard last, CLOCK_MONOTONIC of this host; 0: never. Writer: lgsup,
 *                    again and again. Readers: who shows the run to people. Nothing is decided by it.
 *   verdict          of the leader, or of a survivor that holds one of a former leader, by the same cards (board.h, rule 5).
 *
 *   row.local        trainer r: see above. Writer: the rank, release, when the device is done. Reader: exchange r, which
 *                    then reads `outgoing`. It is overwritten in REDUCE(s + 1), after UPDATE(s): everybody has it.
 *   row.exchanged    exchange r: `incoming` holds the total of step s, and row.loss_sum[s & 1] the loss of all hosts'
 *                    ranks r, in host order. Writer: exchange r, release. Readers: the rank, exchange 0. Overwritten in
 *                    step s + 1, which needs every rank's `local` of s + 1. Dying before the store: done again.
 *   row.entered       exchange r: the epoch that it has entered: it has closed whatever belonged to an older one, and
 *                    stores no `exchanged` in the name of that any more. Exchange 0 speaks for the host in an epoch when
 *                    all of them have entered it.
 *   row.fetched      exchange r: state start_step of shard r, taken from the leader, lies in this host's memory. Writer:
 *                    exchange r, once, release, after the stamps of that memory. Readers: rank r and the EMA keeper, which
 *                    then begin with it. Dying before the store: all of it is taken again. */
#pragma once
#include "base/check.h"
#include "shm/layout.h"
#include <stdbool.h>

enum { LG_HOSTS_MAX = 64, LG_HOST_INFOS = 4, LG_HOST_EPOCHS = 4, LG_HOST_VERDICTS = 4 };
enum { LG_HOST_ADDRESS_BYTES = 64 };

/* What all hosts must know of the samples of a step. */
struct lg_host_info {
    _Atomic(lg_mark) of;
    uint64_t valid, voids; /* samples that are neither void nor absent; void ones */
    uint64_t keys_hash;    /* of this host's samples in order, as in config/ledger.h */
};

enum lg_host_asks { LG_HOST_ASKS_DRAIN = 1, LG_HOST_ASKS_YIELD = 2 };

struct lg_host_card {
    _Atomic(uint64_t) said_in;
    _Atomic(lg_mark) commit;    /* least of its ranks */
    _Atomic(lg_mark) exchanged; /* likewise */
    _Atomic(lg_mark) published; /* checkpoints, by its writer */
    _Atomic(uint32_t) asks;     /* lg_host_asks: what its lgsup wants of the leader */
    struct lg_host_info info[LG_HOST_INFOS];
};

/* Where the exchange processes of a host listen: number r at port + r. */
struct lg_host_member {
    char address[LG_HOST_ADDRESS_BYTES]; /* numeric, IPv4 or IPv6 */
    uint32_t port;
    uint32_t place; /* of its machine in hosts.list */
    uint64_t life;  /* another one is another life of the host, which knows nothing of the former */
};

struct lg_hosts_record {
    uint64_t formation;  /* the same in all epochs of a run that was formed once by all hosts */
    uint64_t number;     /* from 1 */
    uint64_t first_step; /* with which the formation began */
    uint64_t members;    /* bit h: host h */
    int leader;          /* a member that has the state, if any member has it */
    struct lg_host_member member[LG_HOSTS_MAX];
};

/* What lgsup has promised the others about the epoch that follows on `base` (supervisor/hosts/group.h): its successor
 * must not promise anything else. Writer: lgsup, into the side that is not in force, then vote_at with release. */
struct lg_hosts_vote {
    uint64_t base, promised, accepted;
    struct lg_hosts_record record; /* that was accepted; number 0: none */
};

struct lg_board_hosts {
    int count, host; /* H and h; 1 and 0: there are no others */
    uint64_t life;   /* of this host */
    bool comes;      /* to a run that goes on: its first state is the leader's, whatever happens */
    _Atomic(uint64_t) epoch;
    _Atomic(uint32_t) lost;
    struct lg_hosts_record of[LG_HOST_EPOCHS];
    struct lg_host_card card[LG_HOSTS_MAX];
    struct lg_hosts_vote vote[2];
    _Atomic(uint32_t) vote_at;
    _Atomic(int64_t) heard_ns[LG_HOSTS_MAX];
};

typedef struct lg_board lg_board;
struct lg_loss_sum;

static inline uint64_t lg_hosts_all(int count)
{
    return count >= 64 ? UINT64_MAX : (UINT64_C(1) << count) - 1;
}

/* n of the host's own sample m; `batch`: samples of one step on one host. */
struct lg_host_place {
    uint64_t batch;
    int hosts, host;
};
static inline uint64_t lg_host_sample(struct lg_host_place p, uint64_t m)
{
    const uint64_t step = m / p.batch, of_step = m % p.batch;
    return (step * (uint64_t)p.hosts + (uint64_t)p.host) * p.batch + of_step;
}
struct lg_host_place lg_hosts_place(lg_board *b);

bool lg_hosts_are_several(lg_board *b);

/* lgsup: stores an epoch. record->number is larger than the present one; the leader is a member, as is this host. */
void lg_hosts_enter(lg_board *b, const struct lg_hosts_record *record);
/* lgsup: this side has lost. */
void lg_hosts_lose(lg_board *b);

/* The present epoch: its number, 0: there is none yet, or this side has lost. ret may be NULL. Acquire. */
uint64_t lg_hosts_epoch(lg_board *b, struct lg_hosts_record *ret);
bool lg_hosts_is_complete(lg_board *b, const struct lg_hosts_record *e);
/* Is this host the present epoch's leader? With one host always. */
bool lg_hosts_is_leader(lg_board *b);

/* Has every member of the present epoch exchanged step s, or even updated? (UPDATE) */
bool lg_hosts_have_exchanged(lg_board *b, uint64_t step);
/* The info of every host of step s: false while one is missing. ret: (count) or NULL. */
struct lg_host_sums {
    uint64_t valid, voids;
    uint64_t
        keys_hash; /* of all samples: with one host its own, with several the hash of theirs in host order */
};
bool lg_hosts_sums(lg_board *b, uint64_t step, struct lg_host_sums *ret);
/* May the leader decide a verdict? When every member's card of this epoch is there, and with it what verdicts it holds. */
bool lg_hosts_may_decide(lg_board *b);
/* OR of lg_host_asks of all members. */
unsigned lg_hosts_asks(lg_board *b);
/* Has the leader published the checkpoint of this state, or is this host the leader? (WRITE) */
typedef enum lg_host_write {
    LG_HOST_WRITE,     /* this host writes */
    LG_HOST_WRITTEN,   /* the leader has */
    LG_HOST_WRITE_WAIT /* it has not, or nobody leads */
} lg_host_write;
lg_host_write lg_hosts_write(lg_board *b, uint64_t state);
/* Leader: have all members said that this checkpoint is published for them, too? Who leads ends last. */
bool lg_hosts_published(lg_board *b, uint64_t state);
/* Has host h said something in the present epoch? What it has said of verdicts stands on the board then. */
bool lg_hosts_has_card(lg_board *b, int h);
/* Has the present epoch come to rest? True when all members have state *ret_state and not all have exchanged that step:
 * without a host that is missing none of them will ever go on. A complete epoch never rests. */
bool lg_hosts_settled(lg_board *b, uint64_t *ret_state);

/* Where a host's first state comes from. */
typedef enum lg_host_begin {
    LG_HOST_BEGIN_ORIGIN, /* checkpoint, weights, seed: with one host, and the leader when no member has a state */
    LG_HOST_BEGIN_FETCH, /* from the leader */
    LG_HOST_BEGIN_WAIT,  /* no epoch yet, or not all members have been heard */
} lg_host_begin;
lg_host_begin lg_hosts_begin(lg_board *b);
/* Shard r has been fetched. */
bool lg_hosts_fetched(lg_board *b, int rank);

/* Exchange r: the next step to exchange, the one after row.exchanged or the first. */
uint64_t lg_exchange_next(lg_board *b, int rank);
/* The stores that follow the work. */
void lg_exchange_mark_entered(lg_board *b, int rank, uint64_t epoch);
/* The loss of all hosts' ranks r; stored before the mark. */
void lg_exchange_mark_exchanged(lg_board *b, int rank, uint64_t step,
                                const struct lg_loss_sum *loss);
void lg_exchange_mark_fetched(lg_board *b, int rank);

/* A card as it travels: host byte order, all hosts run the same build. */
struct lg_host_said {
    lg_mark commit, exchanged, published;
    uint64_t verdict[LG_HOST_VERDICTS]; /* board words of the newest steps, 0: none */
    struct {
        lg_mark of;
        uint64_t valid, voids, keys_hash;
    } info[LG_HOST_INFOS];
    uint32_t asks, reserved;
};
/* Exchange 0: what this host says; false while not all of its exchange processes have entered `epoch`. */
bool lg_hosts_say(lg_board *b, uint64_t epoch, struct lg_host_said *ret);
/* Exchange 0: what host h said in `epoch`, itself included; adopts verdicts. A card of another epoch is not heard. */
void lg_hosts_hear(lg_board *b, int h, uint64_t epoch, const struct lg_host_said *said);
/* Exchange 0: has this host's info of step s been said? And the store. */
bool lg_hosts_has_info(lg_board *b, uint64_t step);
void lg_hosts_set_info(lg_board *b, uint64_t step, const struct lg_host_sums *own);
