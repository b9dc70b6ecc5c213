/* Between the files of cluster.h: cluster.c has the thread, its lock, and what others call; cluster_turn.c what is done
 * under the lock with what was heard. */
#pragma once
#include "supervisor/hosts/channel.h"
#include "supervisor/hosts/cluster.h"
#include "supervisor/hosts/places.h"
#include "supervisor/run/worker.h"
#include <pthread.h>

enum { LG_CLUSTER_NEWS_MAX = 32 };

struct lg_cluster {
    struct lg_group group;
    struct lg_host_places places;
    char exchange[LG_PLACES_MAX][LG_HOST_ADDRESS_BYTES]; /* as the places say */
    uint32_t port;                                       /* of exchange processes */
    uint64_t lineage;
    char shared[LG_PATH_BYTES];
    uint64_t shared_number; /* of that folder (shared.h) */
    lg_channel *channel;
    lg_worker *worker; /* makes files of epochs */
    lg_answers *answers;
    lg_board *board;
    int64_t beat_ns, next_beat_ns, next_said_ns, next_link_said_ns;
    int wake_fd;
    bool runs, ends, lost, refused, ended, quorum_missing;
    uint64_t up; /* places that were up at the last look */
    struct lg_cluster_news news[LG_CLUSTER_NEWS_MAX];
    int first_news, n_news;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

/* Under the lock, all but the last: */

/* Hears what has come, looks at the board, decides, obeys and says. */
void lg_cluster_turn(lg_cluster *c);
/* What follows from the group's `news` (group.h). */
void lg_cluster_obey(lg_cluster *c, unsigned news);
/* The epoch onto the board, if there is one and this host is a member. */
void lg_cluster_write_epoch(lg_cluster *c);
/* A beat to every other machine. */
void lg_cluster_send_all(lg_cluster *c);
/* "0, 2" of the bits. */
void lg_cluster_list(uint64_t bits, char *ret, size_t bytes);
