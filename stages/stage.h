/* The life every stage shares: attach to the run, join the board, loop, leave.
 *
 *     int main(int argc, char **argv) { return lg_stage_main(argc, argv, &definition); }
 *
 * Command lines, as lgsup and systemd units use them:
 *     lg-<role> --run DIR --index K --incarnation I      work
 *     lg-<role> --plan CONFIG [--set k=v ...]            print this role's bytes as JSON and exit
 *     lg-<role> --described CONFIG [...]                 the same, of GPUs that are not there
 *     lg-text --plan CONFIG --role text.t5 [...]         of one of several text encoders
 *
 * A run directory holds config.toml (the effective config), plan.json, board, runtime (a text file:
 * path of the runtime directory with the sockets).
 *
 * The loop calls step() again and again. step() does one bounded piece of work and returns
 * LG_STEP_WORKED, or LG_STEP_IDLE when shared memory offers nothing: then the stage sleeps on the
 * bus until somebody notifies, IDLE_MS at most, and looks again. It returns LG_STEP_DONE when
 * nothing will ever be left to do; the stage then waits for lgsup's word to exit. Negative codes
 * end the process: exit code = -code.
 *
 * What takes long inside open() or step() gives a heartbeat after each piece (base/heartbeat.h), or it is
 * killed for a hang; the functions of base, io, nets and kernels do so.
 *
 * Between two calls of step() a stage holds nothing that another would have to wait for: no claim, no
 * turn, no half-written file. There it leaves when lgsup asks this process to (shm/board.h, rule 7); a
 * trainer rank only between steps (lg_trainer_may_leave).
 *
 * Regions are opened in open() alone. The first step() comes when each of them has a second copy
 * (shm/region.h): a replacement finds that so, at a run's start all wait for lgsup. In open() a stage may use
 * only what is filled once.
 *
 * A process whose incarnation lies in another row than (role, index) is a standby (rule 8): it opens
 * everything, says that it is ready, and takes over when its predecessor has gone. A trainer rank
 * only attaches and opens after it has taken over: its private memory would not fit twice beside the
 * other's, and metrics.jsonl has one writer.
 */
#pragma once
#include "bus/wake.h"
#include "config/config.h"
#include "config/plan.h"
#include "kernels/device.h"
#include "shm/board.h"
#include "shm/commit.h"
#include "shm/region.h"
#include "shm/stamp.h"
#include "shm/window.h"

enum { LG_STEP_WORKED = 0, LG_STEP_IDLE = 1, LG_STEP_DONE = 2 };
enum { LG_STAGE_DEVICES_MAX = 16, LG_DEVICE_NAME_BYTES = 16 };

typedef struct lg_stage {
    lg_role role;
    int index;
    lg_incarnation me;
    lg_config *config;
    lg_plan plan;
    lg_board *board;
    struct lg_board_row *row;
    lg_bus *bus;
    char run_dir[LG_PATH_BYTES];
    char runtime_dir[LG_PATH_BYTES];
    char keeper[LG_PATH_BYTES]; /* socket */
    const char *waiting_for;    /* what the last idle step waited for, for status */
    void *state;                /* the role's own */
    lg_region *region[1024];    /* all regions opened, to deposit again */
    int n_regions;
    bool copied;                             /* each of them has a second copy */
    lg_device *device[LG_STAGE_DEVICES_MAX]; /* opened so far, closed after the regions */
    int device_gpu
        [LG_STAGE_DEVICES_MAX]; /* their numbers; -1 for the host, -2 for the one beside */
    int n_devices;
    uint32_t keeper_epoch, members_epoch, sockets_epoch;
    lg_turn turn; /* of its GPU; around what a step launches there, until its stream is done */
} lg_stage;

/* What `lgsup check` adds up: a region, or "private" for memory that dies with its process. */
struct lg_stage_bytes {
    char name[LG_REGION_NAME_BYTES];
    char device[LG_DEVICE_NAME_BYTES]; /* "host", "cuda:0" */
    size_t bytes;
    int processes;      /* of private memory on a GPU: that many have a context there */
    size_t activations; /* of private memory: what memory.recompute could make less */
    char note[512];     /* of private memory: what is to be known of it, in lines; "": nothing */
};
struct lg_stage_def {
    lg_role
        role; /* LG_ROLE_text stands for all text encoders: which one, the incarnation's row says */
    /* Regions and private memory of all instances of this role together; rows[cap], count returned
     * in *ret_n. */
    int (*bytes)(const lg_config *, const lg_plan *, lg_role, struct lg_stage_bytes *rows, int cap,
                 int *ret_n);
    int (*open)(lg_stage *); /* allocate everything; sets ->state */
    int (*step)(lg_stage *); /* see above */
    void (*close)(lg_stage *);
};
int lg_stage_main(int argc, char **argv, const struct lg_stage_def *def);

/* The device of an instance: "host", or "cuda:K" where the plan puts it. */
void lg_stage_device_name(const lg_config *c, lg_role role, int index,
                          char ret[LG_DEVICE_NAME_BYTES]);
/* Puts the config's key in front of the message of an error; returns rc. For `bytes` functions, which look at the files of models,
 * so that what is wrong with them is said before anything starts: but not where the plan is_described (lgsup check --memory),
 * for then files may say shapes and hold no weights. */
int lg_stage_error_of_key(const char *key, int rc);
/* Opens it as the plan says, for `bytes` functions; the caller closes it. */
int lg_stage_plan_device(const lg_config *c, const lg_plan *p, lg_role role, int index,
                         lg_device **ret);
/* For `bytes` functions of what has the host's device beside a GPU (lg_stage_host_device): an error that begins with the key which
 * asks for it, where its backend is missing or does not open. */
int lg_stage_plan_host_device(const lg_config *c, const lg_plan *p, lg_role role, const char *key);
/* The same for a stage at work: opened once, closed by the stage after its regions. A stage may open
 * the devices of other instances too (the EMA keeper, the writer: the ranks'). */
int lg_stage_device(lg_stage *st, lg_role role, int index, lg_device **ret);
/* A host device with the role's threads, for what lies with the host whatever the config's device is: an object of its
 * own, beside that of lg_stage_device. */
int lg_stage_host_device(lg_stage *st, lg_role role, lg_device **ret);

/* Opens a region of this run and remembers it. Name as in printf. */
struct lg_stage_memory {
    size_t bytes;       /* of the payload */
    size_t front_bytes; /* of host memory in front of it */
    lg_device *device;  /* that maps the payload; NULL or a host device: it is host memory */
    lg_role role;       /* of the instance whose GPU it is made on, */
    int index;          /* which need not be this device */
    bool is_made;       /* a mark says that its contents were made: not to be there is to be lost */
    /* Ranks hand it to each other: where the plan says so (apart), it is host memory that the device reaches. */
    bool is_handed;
    bool is_with_host; /* host memory that the device reaches, whatever the plan says */
    bool front_only;   /* of the region of another's GPU, which this process does not map */
};
int lg_stage_region(lg_stage *st, const struct lg_stage_memory *m, lg_region **ret, const char *fmt,
                    ...) __attribute__((format(printf, 4, 5)));
/* Fill-once with waiting, for a net's weights: if this process is to fill r, calls load() for fp32 values
 * [first, first + count) on the host and brings them into the payload in the device's type. */
struct lg_stage_weights {
    lg_device *device; /* of the payload */
    size_t count;      /* of all */
    size_t piece;      /* as many at a time; 0: all at once */
    int (*load)(lg_stage *, size_t first, size_t count, float *ret, void *arg);
    /* In place of all that: fills the region itself, which is of another layout (stages/stored.h). */
    int (*fill)(lg_stage *, lg_region *, void *arg);
    void *arg;
};
int lg_stage_fill(lg_stage *st, lg_region *r, const struct lg_stage_weights *w);
/* fp32 values from the host into a buffer of the device's type; waits until they are there. */
int lg_stage_upload(lg_device *d, void *dst, const float *host, size_t count);
/* The window of this run, for processes with this device; with NULL (a loader) payloads on GPUs, and what GPUs hand
 * each other, are left out. */
int lg_stage_window(lg_stage *st, lg_device *device, lg_window **ret);
/* Do latents lie with the host (where a loader provides them), whatever the device? */
bool lg_stage_latents_on_host(const lg_plan *p);
/* Records why the run cannot go on, for people, and returns LG_ERR_PARKED. */
int lg_stage_park(lg_stage *st, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Memory of which a mark says that it was made is not there: parks, and lgsup keeps nothing of the run's
 * memory (shm/board.h, rule 10), so that the next start goes on from the newest checkpoint. */
int lg_stage_lost(lg_stage *st, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Does what a mark says lie in the region whose front begins with this stamp? 0, or as lg_stage_lost. */
int lg_stage_expect(lg_stage *st, const lg_region *r, uint64_t state);
/* The same for a stamp that stands elsewhere; `name` is for people. */
int lg_stage_expect_stamp(lg_stage *st, const struct lg_stamp *s, const char *name, uint64_t state);
/* It does not. */
int lg_stage_lost_stamp(lg_stage *st, const struct lg_stamp *s, const char *name, uint64_t state);
/* rc < 0 came from reading what the run needs (`what`): parks when it will be the same next time;
 * else (the system refused a file or memory, which may pass) returns it, and the process is started
 * again, supervisor.restarts_max bounding how often. rc >= 0 is returned as it is. */
int lg_stage_park_if_lasting(lg_stage *st, int rc, const char *what);
/* From now on this thread's long work beats in st's row, wherever that is (base/heartbeat.h). */
void lg_stage_beats(lg_stage *st);
/* Has the process or the run been told to end? */
bool lg_stage_should_quit(const lg_stage *st);
/* The run's number of this host's sample: what decides its bits (shm/hosts.h). */
uint64_t lg_stage_sample(const lg_stage *st, uint64_t n);
/* Last sample number + 1 of this host in the run (max_steps * batch, or the final state's when stopping). */
uint64_t lg_stage_end(lg_stage *st);
