/* Figures for Prometheus at http://127.0.0.1:PORT/metrics ([supervisor] prometheus_port).
 *
 * HTTP/1.0, one request a connection, inside lgsup's poll loop: nothing here blocks, every connection
 * has a deadline, requests have a length, connections a number. Listens on the loopback interface
 * alone; whoever may use that (every user of the machine) may read. */
#pragma once
#include "shm/board.h"
#include "supervisor/run/run.h"
#include <poll.h>

enum {
    LG_PROMETHEUS_CLIENTS_MAX = 8,
    LG_PROMETHEUS_FDS_MAX = LG_PROMETHEUS_CLIENTS_MAX + 1,
    LG_PROMETHEUS_REQUEST_BYTES = 4096,
    LG_PROMETHEUS_CLIENT_MS_MAX = 5000, /* from accept to the last byte */
};

struct lg_prometheus_client {
    int fd; /* -1: free */
    int64_t deadline_ns;
    char request[LG_PROMETHEUS_REQUEST_BYTES];
    size_t request_bytes;
    char *answer; /* NULL: the request is not whole yet */
    size_t answer_bytes, sent;
};

typedef struct lg_prometheus {
    bool open;
    int fd;
    struct lg_prometheus_client client[LG_PROMETHEUS_CLIENTS_MAX];
} lg_prometheus;

/* The text of all figures, as of now; the caller frees it. NULL: no memory. */
char *lg_prometheus_text(const lg_run *run, lg_board *b);

/* Binds 127.0.0.1:port. LG_ERR_BUSY when somebody else has it. */
int lg_prometheus_open(int port, lg_prometheus *ret);
void lg_prometheus_close(lg_prometheus *p);
/* What to wait for; returns how many were filled in (LG_PROMETHEUS_FDS_MAX at most). */
int lg_prometheus_poll(const lg_prometheus *p, struct pollfd ret[LG_PROMETHEUS_FDS_MAX]);
/* Does what can be done without waiting. */
void lg_prometheus_serve(lg_prometheus *p, const lg_run *run, lg_board *b);
