/* What a service manager wants to hear of lgsup (sd_notify(3)): that the run is ready, what it does,
 * that lgsup is alive, that it ends. Without NOTIFY_SOCKET everything here does nothing. */
#pragma once
#include "supervisor/run/worker.h"

struct lg_view;

/* One look, at every turn of the loop. READY=1 once every role has been ready, STATUS= when a second
 * has passed, WATCHDOG=1 well within the interval that was asked for, STOPPING=1 when processes are
 * told to leave. Each is a job of `w`, since a service manager that does not read its socket holds up who
 * writes; a loop that hangs gives no more of them. */
void lg_notify_look(lg_worker *w, const struct lg_view *v);
/* WATCHDOG=1 alone, for what lasts after the loop, without a worker. */
void lg_notify_alive(void);
/* STOPPING=1 with a reason. */
void lg_notify_stopping(lg_worker *w, const char *why);
