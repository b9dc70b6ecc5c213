/* A service manager's fd store for tests: a thread that listens at NOTIFY_SOCKET and does what
 * systemd does: takes fds by name, drops them, closes barriers in order, and hands the next keeper
 * all it has. Failures of the set-up are assertions. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { STORE_FDS_MAX = 16, STORE_NAME_BYTES = 128 };

struct store_manager {
    char path[108]; /* of the socket */
    int socket;
    pthread_t thread;
    pthread_mutex_t mutex;
    struct {
        char name[STORE_NAME_BYTES];
        int fd;
    } stored[STORE_FDS_MAX];
    int n_stored;
    char last_store[512]; /* the text that came with the last fd */
    bool doubled;         /* a name was stored while the store had it */
    _Atomic(bool) hold;   /* barriers stay closed */
    _Atomic(int) let;     /* but so many */
    _Atomic(bool) deaf;   /* nothing is read: the socket's queue fills (store_manager_deafen) */
    _Atomic(bool) is_deaf;
    _Atomic(bool) over, ready;
    _Atomic(int) n_barriers;
};

/* Listens at dir/notify and sets NOTIFY_SOCKET. */
void store_manager_start(struct store_manager *m, const char *dir);
void store_manager_stop(struct store_manager *m);
/* The store gets one more (fd is the store's), or loses all. */
void store_manager_add(struct store_manager *m, const char *name, int fd);
void store_manager_clear(struct store_manager *m);
/* From now on nothing is read, until `deaf` is false again. */
void store_manager_deafen(struct store_manager *m);
int store_manager_count(struct store_manager *m);
/* In a child that is to be a keeper: fds from 3 on and the variables, as sd_listen_fds(3) wants
 * them. */
void store_manager_pass(struct store_manager *m);
