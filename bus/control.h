/* lgsup's end of the line: a ROUTER that hears stages and commands, and the client that sends one
 * command. */
#pragma once
#include "bus/message.h"

enum { LG_PEER_BYTES = 64 };
/* Who sent a message; the answer goes there. */
struct lg_peer {
    unsigned char id[LG_PEER_BYTES];
    size_t bytes;
    uint64_t
        order; /* not of this line: another host's, by this name (supervisor/hosts); 0: of this line */
};

typedef struct lg_control lg_control;
/* Binds RUNTIME/lgsup; an old socket file is replaced (the run's lock says who may). */
int lg_control_open(const char *runtime_dir, lg_control **ret);
/* Listens at RUNTIME/lgsup of this directory as well: its socket's file was removed. Connections stay. */
int lg_control_listen_again(lg_control *c, const char *runtime_dir);
void lg_control_close(lg_control **c);
/* For poll(). Edge-triggered, as ZeroMQ's fds are: receive until 0 before every poll. */
int lg_control_fd(lg_control *c);
/* Never blocks. 1: a message; 0: none is pending. Malformed ones are dropped silently. */
int lg_control_receive(lg_control *c, struct lg_peer *ret_peer, struct lg_message *ret);
/* Best effort, never blocks. */
void lg_control_answer(lg_control *c, const struct lg_peer *peer, const struct lg_message *m);
/* Wakes a stage so that it looks at the board now. */
void lg_control_nudge(lg_control *c, lg_role role, int index, lg_incarnation incarnation);

/* Sends a command and waits for an answer that comes when it is carried out: as long as lgsup, of which
 * pidfd tells, lives. say() is called every say_ms of it. LG_ERR_FAILED when lgsup ends before. */
struct lg_control_wait {
    int pidfd, say_ms;
    void (*say)(void);
};
int lg_control_order(const char *runtime_dir, const struct lg_message *m,
                     const struct lg_control_wait *w, struct lg_message *ret_answer);
/* Sends a command and waits for the answer. LG_ERR_TIMEOUT when none comes within timeout_ms. */
int lg_control_ask(const char *runtime_dir, const struct lg_message *m, int timeout_ms,
                   struct lg_message *ret_answer);
