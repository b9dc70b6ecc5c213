/* The keeper holds fds by name and nothing else. Protocol: one Unix seqpacket socket, one request
 * and one reply of fixed size each, fds by SCM_RIGHTS. Both ends ask the kernel for the other's uid
 * (SO_PEERCRED) and speak to their own user alone.
 *
 *     put   name + fd -> held, or LG_ERR_BUSY when the name exists (the old fd stays)
 *     get   name -> fd, or LG_ERR_NOTFOUND
 *     list  k -> name and size of the k-th, or LG_ERR_NOTFOUND at the end
 *     drop  name -> forgotten (also when it was not there); "" drops everything and ends the keeper
 *
 * The answers to put and get say whether the service manager's fd store holds it as well.
 */
#pragma once
#include "shm/layout.h"

enum { LG_KEEPER_REGIONS_MAX = 1024 };

enum { LG_SOCKET_PATH_MAX = 107 }; /* sockaddr_un has 108 bytes, one for the NUL */

/* Each call connects, asks and disconnects; waits at most 5 s for an answer (LG_ERR_TIMEOUT), and
 * gives LG_ERR_NOTFOUND / LG_ERR_BUSY as above, LG_ERR_IO when no keeper listens. Put and get return
 * LG_KEEPER_STORED, which is > 0, instead of 0 when the store holds it, too. */
enum { LG_KEEPER_STORED = 1 };
int lg_keeper_put(const char *socket_path, const char *name, uint64_t bytes, int fd);
int lg_keeper_get(const char *socket_path, const char *name, uint64_t *ret_bytes, int *ret_fd);
int lg_keeper_list(const char *socket_path, int k, char ret_name[LG_REGION_NAME_BYTES],
                   uint64_t *ret_bytes);
int lg_keeper_drop(const char *socket_path, const char *name);
/* Who listens there: the keeper's pid, as the kernel knows it. LG_ERR_IO when nobody does. */
int lg_keeper_pid(const char *socket_path, int *ret_pid);

/* The server: binds socket_path (an old socket file is replaced), serves until dropped or SIGTERM.
 * ready_fd (or -1) gets one byte when it listens; when nobody reads it any more the server ends. The
 * socket file is gone when drop "" is answered. The process is made a child subreaper and reaps.
 */
int lg_keeper_serve(const char *socket_path, int ready_fd);
/* The same as a service with an fd store (keeper_store.h): a put or drop is answered when the store
 * has followed. Begins with what the store holds, at socket_path; with an empty store at
 * "socket_path.new", which whoever knows that nothing is missing renames (supervisor/core/keep.h). */
int lg_keeper_serve_stored(const char *socket_path);
