/* The keeper's messages, for its client and its server. Same machine, same build. */
#pragma once
#include "shm/keeper.h"
#include <sys/socket.h>
#include <sys/un.h>

#define LG_KEEPER_MAGIC UINT32_C(0x706b676c)
enum { LG_KEEPER_PUT = 1, LG_KEEPER_GET, LG_KEEPER_LIST, LG_KEEPER_DROP };

struct lg_keeper_message {
    uint32_t magic, op;
    int32_t code, k; /* answer: 0, LG_KEEPER_STORED or lg_err; question LIST: which */
    uint64_t bytes;
    char name[LG_REGION_NAME_BYTES];
};
static_assert(sizeof(struct lg_keeper_message) == 88, "no padding travels");

/* LG_ERR_CONFIG when the path does not fit a socket's address. */
int lg_keeper_address(const char *path, struct sockaddr_un *ret);
/* 0 or -1 with errno. Never raises SIGPIPE. */
int lg_keeper_send(int socket, const struct lg_keeper_message *m, int fd, int flags);
/* Bytes received (0: end), or -1 with errno. *ret_fd: the fd that came along, close-on-exec, or -1;
 * further ones are closed. */
int lg_keeper_receive(int socket, struct lg_keeper_message *ret, int *ret_fd, int flags);
