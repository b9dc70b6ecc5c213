/* This host among the others: a thread that hears and speaks (channel.h), decides by group.h, and writes what was decided
 * onto the board (shm/hosts.h). It has a thread of its own so that a beat goes out whatever lgsup's loop is at; the
 * loop collects what is to be said and obeys what is lost. A run of one host has none of this.
 *
 * The thread ends with its process. So a lgsup that dies is silent, and its host is lost after hosts.silence_ms, unless
 * another lgsup has taken it over by then: it goes on with the board's life, epoch and promises. */
#pragma once
#include "config/config.h"
#include "shm/board.h"
#include "supervisor/hosts/answers.h"
#include "supervisor/hosts/group.h"

typedef struct lg_cluster lg_cluster;

struct lg_cluster_spec {
    const lg_config *config;
    uint64_t plan_hash, lineage;
    struct lg_origin origin;     /* what this host would begin with */
    struct lg_answerer answerer; /* of what other hosts ask; it outlives this process' clusters */
    lg_board *board;             /* of a former lgsup, which is taken over; NULL: a start */
};
/* Listens and speaks from now on. LG_ERR_CONFIG, LG_ERR_IO: list, key, address, port. */
int lg_cluster_open(const struct lg_cluster_spec *spec, lg_cluster **ret);
/* Tells the others that this host is gone for good, unless it is done. NULL is fine. */
void lg_cluster_close(lg_cluster **c);

struct lg_cluster_place {
    int host; /* which number this machine has */
    bool comes;
    uint64_t life;
    struct lg_origin origin; /* the state for which the board is to be made */
};
/* Waits for at most timeout_ms. 1: *ret is there, and the others count on it; 0: not yet. LG_ERR_MISMATCH: the others run something else;
 * LG_ERR_BUSY: the place that was offered has been taken by another; LG_ERR_STOP, without a text: the run has ended
 * and did not need this machine. */
int lg_cluster_join(lg_cluster *c, int timeout_ms, struct lg_cluster_place *ret);
/* "waiting for places 1, 2 of hosts.list" */
void lg_cluster_waits_for(lg_cluster *c, char *ret, size_t bytes);
/* The board that was made for it; it outlives the cluster. */
void lg_cluster_attach(lg_cluster *c, lg_board *b);

struct lg_cluster_news {
    bool lost; /* the last one: this host is to stop */
    bool bad;  /* a warning */
    char text[LG_GROUP_TEXT + 100];
};
/* False: nothing new. */
bool lg_cluster_news(lg_cluster *c, struct lg_cluster_news *ret);
/* Nothing is left to do here; again and again. True: the others are as far, or gone. */
bool lg_cluster_finish(lg_cluster *c);
/* An order that a command on another host has sent to this one (question.h); false: none. It is answered once, by its
 * name, when it is carried out or refused (code < 0). */
bool lg_cluster_order(lg_cluster *c, struct lg_question *ret, uint64_t *ret_order);
void lg_cluster_answer(lg_cluster *c, uint64_t order, int code, const char *text);
/* The operator's word; see lg_group_take. */
int lg_cluster_take(lg_cluster *c);
