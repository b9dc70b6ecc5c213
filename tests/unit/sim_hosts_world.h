/* The world of the simulation of several hosts from inside; sim_hosts.h says what it is. sim_hosts.c has the scheduler and
 * the supervisors, sim_hosts_net.c the network, sim_hosts_stages.c ranks and writers. */
#pragma once
#include "shm/commit.h"
#include "stages/exchange/exchanger.h"
#include "tests/unit/sim_hosts.h"
#include <setjmp.h>

enum {
    HOSTS = 3,
    RANKS = 2,
    COUNT = 150, /* elements of a shard */
    STEPS = 9,
    MESSAGE_BYTES = 128,
    SAMPLES = 4, /* of a host in a step */
    LIVES = 64,  /* of hosts, in one run */
    CONNECTIONS = 512,
    QUEUE = 96,
    ECHOES = 16,
};

struct world;
struct life; /* of a host */

/* An exchange process. */
struct node {
    struct world *w;
    struct life *of;
    int rank;
    bool alive;
    lg_exchanger *x;
    struct lg_transfer *posted[256];
    int n_posted;
    struct lg_transfer
        *half[HOSTS * HOSTS]; /* places in which half of a message lies whose sender is gone */
    int n_half;
    bool happened;
};

struct message {
    uint64_t tag;
    size_t bytes;
    struct lg_transfer *sent;  /* NULL: copied (a note), or its sender is done with it */
    struct lg_transfer *place; /* where its first half has come */
    char note[512];
};

struct connection {
    bool used, failed;
    bool silent;            /* cut off, of which its maker hears nothing */
    struct node *from, *to; /* to: the process that had the address; NULL: none, and it fails */
    int from_host, to_host, peer;
    int n;
    struct message *queue; /* (QUEUE) */
};

/* A note that has come, and comes again. */
struct echo {
    int to, rank; /* host */
    struct message note;
};

struct rank_memory {
    float w[2][COUNT], outgoing[COUNT], incoming[COUNT], parts[8 * COUNT];
    struct lg_stamp stamp[2], out, in;
    struct lg_leaving leaving;
};

struct life {
    struct world *w;
    int host, number;  /* which, and the how many-th of all lives */
    bool up, shut_out; /* shut out: of the epoch, though it goes on */
    bool told;         /* that it is */
    lg_board board;
    struct rank_memory rank[RANKS];
    struct node *node[RANKS]; /* NULL: dead */
    uint64_t down_until[RANKS], rank_down_until[RANKS], writer_down_until;
    struct {
        int pc, j;
        struct lg_action act;
    } task[RANKS];
    uint64_t dies_at; /* noticed by the supervisors */
    bool noticed;
};

struct reference {
    float w[STEPS + 1][RANKS][COUNT], total[STEPS][RANKS][COUNT];
    struct lg_loss_sum loss[STEPS];
    uint64_t keys[STEPS], voids[STEPS], valid[STEPS];
};

struct world {
    const struct sim_hosts_options *options;
    struct sim_hosts_result *result;
    jmp_buf failed, died;
    bool may_die; /* a turn of an exchange process is under way */
    int dies_in;  /* calls of the transport; 0: not in this turn */
    uint64_t rng, now;
    int hosts, ranks;
    int64_t checkpoint_every;
    bool is_silent; /* connections are lost of which their makers hear nothing */
    bool has_written[STEPS + 1];
    unsigned verdict[STEPS];  /* 0: none yet */
    struct life *host[HOSTS]; /* the present life of each number */
    struct life *life[LIVES];
    int n_lives;
    struct lg_hosts_record epoch;
    bool leads_known;
    bool cut[HOSTS][HOSTS];
    uint64_t heals_at;
    struct life *victim; /* dies then; NULL: nobody */
    uint64_t victim_dies;
    struct connection connection[CONNECTIONS];
    int n_connections; /* so many of them have been used */
    struct node *all[LIVES * 64];
    int n_nodes;
    struct reference ref;
    uint64_t last_progress;
    struct echo echo[ECHOES];
    uint64_t calm_at;
    bool calm; /* nothing is disturbed any more */
    uint64_t drained_to;
};

_Noreturn void sim_hosts_fail(struct world *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void sim_hosts_trace(struct world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
uint64_t sim_hosts_random(struct world *w, uint64_t below);
static inline bool sim_hosts_is(const struct world *w, enum sim_hosts_plant p)
{
    return w->options->plant == p;
}

/* sim_hosts_net.c */
extern const struct lg_transport_kind sim_hosts_transport;
void sim_hosts_net_turn(struct world *w);
void sim_hosts_net_died(struct world *w, struct node *n, bool with_host);
void sim_hosts_net_free(struct world *w);
void sim_hosts_net_fail_one(struct world *w);

/* sim_hosts_stages.c */
void sim_hosts_make_reference(struct world *w);
void sim_hosts_rank_turn(struct world *w, struct life *h, int r);
void sim_hosts_writer_turn(struct world *w, struct life *h);
void sim_hosts_info_turn(struct life *h); /* what exchange 0 does beside its exchanger */
int sim_hosts_exchanger(struct node *n, lg_exchanger **ret);
