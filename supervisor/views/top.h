/* `lgsup top DIR`: what a run does, on one screen, again every second.
 *
 * Everything comes from the run directory: the board, the metrics, the newest lines of
 * logs/lgsup.log, /proc of the processes, and, when the keeper answers, the window's control words
 * (mapped read-only). So it works while lgsup is dead, and after the end of the run. Nothing is
 * written and nobody is asked to do anything.
 *
 * top_read.c fills struct lg_top, top_text.c makes lines of it, top.c puts them on the screen. */
#pragma once
#include "shm/window.h"
#include "supervisor/views/metrics.h"
#include "supervisor/views/nvml.h"
#include "supervisor/views/status.h"
#include <time.h>

enum {
    LG_TOP_POINTS = 10,    /* readings that a rate is taken over */
    LG_TOP_METRICS = 2048, /* newest steps that are looked at */
    LG_TOP_MEAN_STEPS = 20,
    LG_TOP_EVENTS = 8,
    LG_TOP_LINES_MAX = LG_ROWS + 64,
    LG_TOP_LINE_BYTES = 1024,
};

/* What grows with the time of a process. */
struct lg_top_counters {
    int64_t at_ns;
    uint64_t samples, busy_ns, cpu_ns;
};

struct lg_top_process {
    struct lg_status_instance is;
    uint64_t private_bytes;                      /* resident, its own */
    uint64_t shared_bytes;                       /* resident, of regions and files */
    lg_incarnation who;                          /* whom the points are about */
    struct lg_top_counters point[LG_TOP_POINTS]; /* oldest first */
    int n_points;
};

struct lg_top {
    char dir[LG_PATH_BYTES];
    struct lg_status status;
    bool has_board;
    uint64_t batch;
    struct lg_top_process process[LG_ROWS]; /* by row of the board; `is` of status.instance[] */
    int row[LG_STATUS_INSTANCES_MAX];       /* of status.instance[i] */
    /* newest steps, oldest first */
    struct lg_metric metric[LG_TOP_METRICS];
    int n_metrics;
    /* window */
    uint64_t run_id;            /* of what is mapped; 0: nothing */
    const struct lg_slot *slot; /* (W) */
    struct lg_window_geometry window;
    uint64_t ready[LG_FIELD_COUNT]; /* slots whose field is complete, not yet committed */
    uint64_t region_bytes;          /* of all regions */
    int n_regions;
    /* machine */
    uint64_t host_used_bytes, host_bytes;
    struct lg_gpu gpu[LG_NVML_MAX];
    int n_gpus;
    char event[LG_TOP_EVENTS][LG_TOP_LINE_BYTES]; /* oldest first */
    int n_events;
    time_t now;
};

/* Reads everything once more; rates need two readings. LG_ERR_NOTFOUND: no run directory. */
int lg_top_read(struct lg_top *t);
void lg_top_close(struct lg_top *t);

typedef char lg_top_line[LG_TOP_LINE_BYTES];
struct lg_top_look {
    int columns;
    bool utf8; /* else plain ASCII */
};
/* The screen as lines without their ends; returns how many. *ret_heading: the line that heads the
 * table of processes. */
int lg_top_text(const struct lg_top *t, const struct lg_top_look *look,
                lg_top_line line[LG_TOP_LINES_MAX], int *ret_heading);

/* The machines of a run of several hosts, of which one at a time is shown whole. */
struct lg_top_hosts {
    void *context;
    /* Reads the others once more, for a limited time. */
    void (*read)(void *context, const struct lg_top_look *look);
    /* A line for each, at the top; returns how many: LG_PLACES_MAX at most. */
    int (*list)(void *context, lg_top_line *line);
    /* The lines of the chosen one, at most `room`; -1: it is this host. */
    int (*frame)(void *context, lg_top_line *line, int room);
    /* Chooses the next one; false: it is the first one again. */
    bool (*next)(void *context);
};

/* The command. once, or no terminal: a frame as text, of each host. On a terminal `q` quits, the tab key shows the next
 * host. hosts: NULL where there is one. */
int lg_top(const char *dir, bool once, const struct lg_top_hosts *hosts);
