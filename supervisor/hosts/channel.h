/* What the supervisors of several hosts hear and say: messages of at most LG_CHANNEL_BYTES over TCP, encrypted and
 * authenticated by CURVE (CurveZMQ, ZeroMQ RFC 26). Each machine listens at its own address, and sends by a connection
 * of its own to each other one.
 *
 * A stranger gets nothing: connections from addresses that are not in the list are closed at once; who does not begin
 * a CURVE handshake is hung up on after a second; who cannot prove to have the cluster's key is refused by our own
 * handler (ZAP, RFC 27), without which every client with a key of its own would be let in. Replayed bytes fail, as each
 * connection has keys of its own. What is longer than a message is not read.
 *
 * Nothing here blocks: what cannot be sent now is dropped, for it is said again soon. One thread uses a channel. */
#pragma once
#include "supervisor/hosts/group.h"
#include "supervisor/hosts/keys.h"
#include <stddef.h>

enum { LG_CHANNEL_BYTES = 16384, LG_ANSWER_BYTES_MAX = 300 << 10, LG_CHANNEL_ID_BYTES = 32 };

struct lg_channel_spec {
    int place, places, port;
    char (*address)[LG_HOST_ADDRESS_BYTES]; /* (places), numeric */
    struct lg_cluster_key key;
    int silence_ms;
};
typedef struct lg_channel lg_channel;

/* LG_ERR_IO: the address is not this machine's, or the port is taken. */
int lg_channel_open(const struct lg_channel_spec *spec, lg_channel **ret);
void lg_channel_close(lg_channel **c);
/* False: it was dropped. */
bool lg_channel_send(lg_channel *c, int place, const void *data, size_t bytes);
/* 0: nothing is there; else the message's bytes. Answers handshakes, too. */
size_t lg_channel_receive(lg_channel *c, void *ret, size_t room);
/* Who sent what was received last; answers go there, by the connection that he has made. */
struct lg_channel_peer {
    unsigned char id[LG_CHANNEL_ID_BYTES];
    size_t bytes;
};
void lg_channel_sender(const lg_channel *c, struct lg_channel_peer *ret);
/* An answer: LG_ANSWER_BYTES_MAX at most. */
void lg_channel_answer(lg_channel *c, const struct lg_channel_peer *to, const void *data,
                       size_t bytes);
/* Waits until there may be something to receive, or wake_fd is readable, or timeout_ms have gone. */
void lg_channel_wait(lg_channel *c, int wake_fd, int timeout_ms);
/* An end that listens nowhere and only asks: lg_channel_send, and the answers of each place. From the address that the
 * others know this machine by. */
int lg_channel_open_asker(const struct lg_channel_spec *spec, lg_channel **ret);
/* 0: that place has not answered yet. A longer one than `room` is cut. */
size_t lg_channel_take(lg_channel *c, int place, void *ret, size_t room);
void lg_channel_wait_for_answers(lg_channel *c, int timeout_ms);
/* Handshakes that were refused since the last call, and who was the last (numeric). */
int lg_channel_refused(lg_channel *c, char ret_who[LG_HOST_ADDRESS_BYTES]);
