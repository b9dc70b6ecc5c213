/* The transport over UCX (https://openucx.org): tag messages, between memory of the hosts, by whatever the machines have
 * between them (TCP, RDMA). UCX's own settings in the environment count; what is set here is only what is not set there.
 *
 * Endpoints report that the other process is gone (error handling mode "peer"); of a host that is gone, or cannot be reached,
 * UCX says nothing for minutes, so it is never asked who lives. A connection is taken only from an address that this
 * process itself connects to; what comes over it is neither signed nor encrypted: the network between exchange processes must
 * be the hosts' own. */
#include "base/clock.h"
#include "base/log.h"
#include "stages/exchange/transport.h"
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

enum { ACCEPTED_MAX = 256, PROGRESS_MAX = 64 };

struct peer {
    ucp_ep_h ep; /* NULL: not connected */
    bool failed;
    struct sockaddr_storage address;
};

struct accepted {
    ucp_ep_h ep;
    bool failed;
};

struct lg_transport {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_listener_h listener;
    int fd, hosts;
    bool happened;
    struct peer *peer;                      /* (hosts) */
    struct accepted accepted[ACCEPTED_MAX]; /* by others; ep NULL: free */
    ucp_conn_request_h request[ACCEPTED_MAX];
    int n_requests;
};

static int failure(ucs_status_t s, const char *what)
{
    return LG_FAIL(LG_ERR_IO, "UCX: %s: %s", what, ucs_status_string(s));
}

#define UCX_TRY(call)                                                                              \
    do {                                                                                           \
        const ucs_status_t status_ = (call);                                                       \
        if (status_ != UCS_OK) return failure(status_, #call);                                     \
    } while (0)

/* ---- addresses ---- */

static bool is_loopback(const struct sockaddr_storage *a)
{
    const uint32_t v4 = ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr);
    return a->ss_family == AF_INET && v4 >> 24 == 127;
}

/* UCX knows an interface by its addresses, and loopback's has one. So the others, at which several hosts of one machine
 * may be, are ports of that one. */
static void fold_loopback(struct sockaddr_in *a)
{
    enum { PORTS_OF_AN_ADDRESS = 256 };
    const uint32_t last = ntohl(a->sin_addr.s_addr) & 255;
    a->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a->sin_port = htons((uint16_t)(ntohs(a->sin_port) + (last - 1) * PORTS_OF_AN_ADDRESS));
}

static int parse_address(const char *text, uint32_t port, struct sockaddr_storage *ret)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)ret;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)ret;
    memset(ret, 0, sizeof *ret);
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        if (is_loopback(ret)) fold_loopback(v4);
        return 0;
    }
    if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons((uint16_t)port);
        return 0;
    }
    return LG_FAIL(LG_ERR_CONFIG, "\"%.60s\" is no numeric address of a host", text);
}

static bool is_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family) return false;
    if (is_loopback(a) && is_loopback(b)) return true;
    if (a->ss_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return a->ss_family == AF_INET6 &&
           !memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                   &((const struct sockaddr_in6 *)b)->sin6_addr, sizeof(struct in6_addr));
}

static ucs_sock_addr_t ucx_address(const struct sockaddr_storage *a)
{
    const bool v6 = a->ss_family == AF_INET6;
    return (ucs_sock_addr_t){.addr = (const struct sockaddr *)a,
                             .addrlen =
                                 v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in)};
}

/* ---- those who connect ---- */

static void on_accepted_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct accepted *a = arg;
    (void)ep;
    (void)status;
    a->failed = true;
}

static void on_request(ucp_conn_request_h request, void *arg)
{
    lg_transport *t = arg;
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
    bool known = false;
    if (ucp_conn_request_query(request, &attr) == UCS_OK)
        for (int h = 0; h < t->hosts; h++)
            known |= is_same_host(&t->peer[h].address, &attr.client_address);
    if (!known || t->n_requests == ACCEPTED_MAX) {
        ucp_listener_reject(t->listener, request);
        return;
    }
    t->request[t->n_requests++] = request;
}

static void close_endpoint(lg_transport *t, ucp_ep_h ep)
{
    const ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t r = ucp_ep_close_nbx(ep, &force);
    (void)t;
    if (r && !UCS_PTR_IS_ERR(r)) ucp_request_free(r); /* it ends by itself */
}

static void accept_one(lg_transport *t, ucp_conn_request_h request)
{
    for (int i = 0; i < ACCEPTED_MAX; i++) {
        struct accepted *a = &t->accepted[i];
        if (a->ep) continue;
        const ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                                 UCP_EP_PARAM_FIELD_ERR_HANDLER |
                                                 UCP_EP_PARAM_FIELD_CONN_REQUEST,
                                   .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                   .err_handler = {on_accepted_error, a},
                                   .conn_request = request};
        a->failed = false;
        if (ucp_ep_create(t->worker, &p, &a->ep) != UCS_OK) a->ep = NULL;
        return;
    }
    ucp_listener_reject(t->listener, request);
}

static void keep_accepted(lg_transport *t)
{
    for (int i = 0; i < t->n_requests; i++) accept_one(t, t->request[i]);
    t->n_requests = 0;
    for (int i = 0; i < ACCEPTED_MAX; i++) {
        struct accepted *a = &t->accepted[i];
        if (!a->ep || !a->failed) continue;
        close_endpoint(t, a->ep);
        a->ep = NULL;
    }
}

/* ---- opening ---- */

/* What the environment does not say. UCX has read some of it before main() has begun; deaths are no news. */
static void choose_settings(const char *interface)
{
    static const char *const setting[][2] = {
        {"UCX_TCP_CM_REUSEADDR", "y"}, /* a successor listens where its predecessor was killed */
        {"UCX_TCP_KEEPIDLE", "2s"},
        {"UCX_TCP_KEEPINTVL", "1s"},
        {"UCX_TCP_KEEPCNT", "3"}};
    if (!getenv("UCX_LOG_LEVEL")) ucs_global_opts_set_value("LOG_LEVEL", "fatal");
    for (size_t i = 0; i < LG_ARRAY_LEN(setting); i++) setenv(setting[i][0], setting[i][1], 0);
    if (interface && interface[0]) setenv("UCX_NET_DEVICES", interface, 0);
}

static int listen_at(lg_transport *t, const struct lg_transport_spec *spec)
{
    struct sockaddr_storage at;
    LG_TRY(parse_address(spec->address, spec->port, &at));
    const ucp_listener_params_t p = {.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR |
                                                   UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
                                     .sockaddr = ucx_address(&at),
                                     .conn_handler = {on_request, t}};
    const ucs_status_t s = ucp_listener_create(t->worker, &p, &t->listener);
    if (s != UCS_OK)
        return LG_FAIL(LG_ERR_IO,
                       "cannot listen at %s port %u: %s: is the address this machine's, and "
                       "the port free (hosts.list, hosts.port)?",
                       spec->address, spec->port, ucs_status_string(s));
    return 0;
}

static int open_ucx(lg_transport *t, const struct lg_transport_spec *spec)
{
    const ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                            .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP};
    const ucp_worker_params_t w = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                   .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_config_t *config;
    choose_settings(spec->interface);
    UCX_TRY(ucp_config_read(NULL, NULL, &config));
    const ucs_status_t s = ucp_init(&p, config, &t->context);
    ucp_config_release(config);
    if (s != UCS_OK) return failure(s, "ucp_init");
    UCX_TRY(ucp_worker_create(t->context, &w, &t->worker));
    UCX_TRY(ucp_worker_get_efd(t->worker, &t->fd));
    return listen_at(t, spec);
}

static void ucx_close(lg_transport **ret)
{
    lg_transport *t = *ret;
    if (!t) return;
    if (t->listener) ucp_listener_destroy(t->listener);
    for (int h = 0; h < t->hosts; h++)
        if (t->peer[h].ep) close_endpoint(t, t->peer[h].ep);
    for (int i = 0; i < ACCEPTED_MAX; i++)
        if (t->accepted[i].ep) close_endpoint(t, t->accepted[i].ep);
    if (t->worker) ucp_worker_destroy(t->worker);
    if (t->context) ucp_cleanup(t->context);
    free(t->peer);
    free(t);
    *ret = NULL;
}

static int ucx_open(const struct lg_transport_spec *spec, lg_transport **ret)
{
    lg_transport *t = calloc(1, sizeof *t);
    LG_ASSERT(t);
    t->fd = -1;
    t->hosts = spec->hosts;
    t->peer = calloc((size_t)spec->hosts, sizeof *t->peer);
    LG_ASSERT(t->peer);
    const int rc = open_ucx(t, spec);
    if (rc < 0) {
        ucx_close(&t);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = t;
    return 0;
}

/* ---- connections ---- */

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct peer *p = arg;
    if (p->ep && p->ep != ep) return;
    p->failed = true;
    lg_log(LG_DEBUG, "a connection has failed: %s", ucs_status_string(status));
}

static int ucx_connect(lg_transport *t, int peer, const char *address, uint32_t port)
{
    struct peer *p = &t->peer[peer];
    LG_ASSERT(!p->ep);
    LG_TRY(parse_address(address, port, &p->address));
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_FLAGS,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {on_error, p},
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr = ucx_address(&p->address)};
    p->failed = false;
    const ucs_status_t s = ucp_ep_create(t->worker, &params, &p->ep);
    if (s == UCS_OK) return 0;
    p->ep = NULL;
    return failure(s, "ucp_ep_create");
}

static void ucx_disconnect(lg_transport *t, int peer)
{
    struct peer *p = &t->peer[peer];
    if (!p->ep) return;
    close_endpoint(t, p->ep);
    p->ep = NULL;
    p->failed = false;
    ucp_worker_progress(t->worker);
}

/* A receive whose message has begun to come cannot be cancelled, and of a host without power UCX hears nothing. */
static void ucx_cut_off(lg_transport *t)
{
    for (int i = 0; i < ACCEPTED_MAX; i++) {
        struct accepted *a = &t->accepted[i];
        if (a->ep) close_endpoint(t, a->ep);
        a->ep = NULL;
    }
    ucp_worker_progress(t->worker);
}

static bool ucx_has_failed(lg_transport *t, int peer)
{
    return t->peer[peer].ep && t->peer[peer].failed;
}

/* ---- messages ---- */

static void finish(struct lg_transfer *m, bool failed)
{
    m->request = NULL;
    m->failed = failed;
    m->done = true;
    m->of->happened = true;
}

static void on_sent(void *request, ucs_status_t status, void *arg)
{
    finish(arg, status != UCS_OK);
    ucp_request_free(request);
}

static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                        void *arg)
{
    struct lg_transfer *m = arg;
    finish(m, status != UCS_OK || info->length != m->bytes);
    ucp_request_free(request);
}

static void ucx_send(lg_transport *t, int peer, struct lg_transfer *m)
{
    struct peer *p = &t->peer[peer];
    const ucp_request_param_t how = {.op_attr_mask =
                                         UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                     .cb.send = on_sent,
                                     .user_data = m};
    m->of = t;
    if (!p->ep) {
        finish(m, true);
        return;
    }
    ucs_status_ptr_t r = ucp_tag_send_nbx(p->ep, m->data, m->bytes, m->tag, &how);
    if (UCS_PTR_IS_ERR(r)) p->failed = true;
    if (!r || UCS_PTR_IS_ERR(r))
        finish(m, r != NULL);
    else if (!m->done)
        m->request = r;
}

static void ucx_receive(lg_transport *t, struct lg_transfer *m)
{
    const bool note = m->tag & LG_TAG_NOTE;
    /* Its length is told to the callback alone. */
    const ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                     UCP_OP_ATTR_FIELD_USER_DATA |
                                                     UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
                                     .cb.recv = on_received,
                                     .user_data = m};
    m->of = t;
    ucs_status_ptr_t r = ucp_tag_recv_nbx(t->worker, m->data, m->bytes, m->tag,
                                          note ? LG_TAG_NOTE | LG_TAG_INNER : UINT64_MAX, &how);
    if (!r || UCS_PTR_IS_ERR(r))
        finish(m, true);
    else if (!m->done) /* the callback may have been there before us */
        m->request = r;
}

static void ucx_cancel(lg_transport *t, struct lg_transfer *m)
{
    if (m->request && !m->done) ucp_request_cancel(t->worker, m->request);
}

/* Answers that nobody waits for would stay for ever, and with them who sends them. */
static void drop_unwanted(lg_transport *t)
{
    static char nowhere[1];
    const ucp_request_param_t how = {0};
    ucp_tag_recv_info_t info;
    ucp_tag_message_h m;
    while ((m = ucp_tag_probe_nb(t->worker, 0, LG_TAG_NOTE, 1, &info))) {
        ucs_status_ptr_t r = ucp_tag_msg_recv_nbx(t->worker, nowhere, 0, m, &how);
        if (r && !UCS_PTR_IS_ERR(r)) ucp_request_free(r);
    }
}

static bool ucx_progress(lg_transport *t)
{
    for (int i = 0; i < PROGRESS_MAX && ucp_worker_progress(t->worker); i++) {
    }
    keep_accepted(t);
    drop_unwanted(t);
    const bool happened = t->happened;
    t->happened = false;
    return happened;
}

static int ucx_fd(lg_transport *t)
{
    return t->fd;
}

static bool ucx_sleeps(lg_transport *t)
{
    return ucp_worker_arm(t->worker) == UCS_OK;
}

const struct lg_transport_kind lg_transport_ucx = {.name = "ucx",
                                                   .open = ucx_open,
                                                   .close = ucx_close,
                                                   .connect = ucx_connect,
                                                   .disconnect = ucx_disconnect,
                                                   .has_failed = ucx_has_failed,
                                                   .cut_off = ucx_cut_off,
                                                   .send = ucx_send,
                                                   .receive = ucx_receive,
                                                   .cancel = ucx_cancel,
                                                   .progress = ucx_progress,
                                                   .fd = ucx_fd,
                                                   .sleeps = ucx_sleeps};
