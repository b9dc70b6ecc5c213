/* What a service manager wants to hear of lgsup (sd_notify(3)): that the run is ready, what it does,
 * that lgsup is alive, that it ends. Without NOTIFY_SOCKET everything here does nothing. */
#pragma once

struct lg_view;

/* One look, at every turn of the loop. READY=1 once every role has been ready, STATUS= when a second
 * has passed, WATCHDOG=1 well within the interval that was asked for, STOPPING=1 when processes are
 * told to leave. */
void lg_notify_look(const struct lg_view *v);
/* WATCHDOG=1 alone, for what lasts after the loop. */
void lg_notify_alive(void);
/* STOPPING=1 with a reason. */
void lg_notify_stopping(const char *why);
