/* The life every stage shares; see stage.h.
 *
 * Order at start: read the run directory, attach to the board (magic, layout, plan hash), join it
 * (compare-and-swap of the incarnation that lgsup gave out: a process that nobody waits for any
 * more exits here), open the bus, let the role allocate, announce ready, loop. */
#include "stages/stage.h"
#include "base/clock.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { IDLE_MS = 20, BYTES_ROWS_MAX = 1024 };

static volatile sig_atomic_t g_terminated;

static void on_terminate(int sig)
{
    (void)sig;
    g_terminated = 1;
}

static int read_line(char ret[LG_PATH_BYTES], const char *fmt, const char *dir)
{
    char path[LG_PATH_BYTES], *text;
    size_t bytes;
    LG_TRY(lg_path(path, fmt, dir));
    LG_TRY(lg_read_file(path, LG_PATH_BYTES - 1, &text, &bytes));
    text[strcspn(text, "\n")] = 0;
    snprintf(ret, LG_PATH_BYTES, "%s", text);
    free(text);
    return 0;
}

/* The instance index of the row that this process fills now: another than its own while it is a standby. */
static int row_index(const lg_stage *st)
{
    return lg_incarnation_row(st->me) % LG_INSTANCES_MAX;
}

static int open_bus(lg_stage *st)
{
    LG_TRY(lg_bus_open(&(struct lg_bus_spec){.runtime_dir = st->runtime_dir,
                                             .role = st->role,
                                             .index = row_index(st),
                                             .incarnation = st->me,
                                             .plan = &st->plan},
                       &st->bus));
    st->members_epoch = 0;
    lg_bus_hello(st->bus);
    return 0;
}

static void beat_on(void *arg)
{
    const lg_stage *st = arg;
    lg_board_beat_on(st->row);
}

void lg_stage_beats(lg_stage *st)
{
    lg_heartbeat_set(beat_on, st);
}

static int attach(lg_stage *st)
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/config.toml", st->run_dir));
    LG_TRY(lg_config_load(path, NULL, 0, &st->config));
    LG_TRY(lg_path(path, "%s/plan.json", st->run_dir));
    LG_TRY(lg_plan_load(path, &st->plan));
    /* Where the CUDA backend keeps the algorithms of this run; see kernels/cuda/algos.h. */
    LG_TRY(lg_path(path, "%s/algorithms", st->run_dir));
    setenv("LG_CUDA_RUN_FILE", path, 1);
    LG_TRY(read_line(st->runtime_dir, "%s/runtime", st->run_dir));
    LG_TRY(lg_path(st->keeper, "%s/keeper", st->runtime_dir));
    LG_TRY(lg_path(path, "%s/board", st->run_dir));
    LG_TRY(lg_board_open(path, st->plan.hash, &st->board));
    if (lg_incarnation_row(st->me) / LG_INSTANCES_MAX != (int)st->role)
        return LG_FAIL(LG_ERR_USAGE, "this program is %s, but incarnation %u is one of %s",
                       lg_role_program(st->role), st->me,
                       lg_role_program((lg_role)(lg_incarnation_row(st->me) / LG_INSTANCES_MAX)));
    LG_TRY(lg_board_join(st->board, st->me));
    st->row = lg_board_row(st->board, st->role, row_index(st));
    st->keeper_epoch = atomic_load(&st->board->s->keeper_epoch);
    st->sockets_epoch = atomic_load(&st->board->s->sockets_epoch);
    lg_board_beat(st->row, LG_PHASE_SETUP);
    lg_stage_beats(st);
    LG_TRY(open_bus(st));
    return 0;
}

/* Is the socket that this process binds where DIR/runtime says, or can nothing be done about it yet? */
static bool sockets_are_well(const lg_stage *st, char ret_dir[LG_PATH_BYTES])
{
    char own[LG_PATH_BYTES];
    bool can = read_line(ret_dir, "%s/runtime", st->run_dir) == 0 &&
               lg_check_private_dir(ret_dir) == 0 &&
               lg_bus_socket(ret_dir, st->role, row_index(st), own) == 0;
    lg_err_clear();
    return !can || (!strcmp(ret_dir, st->runtime_dir) && lg_path_exists(own));
}

/* Sockets were removed: bind the own one again. The old bus goes first, as its end removes the file. */
static int follow_sockets(lg_stage *st)
{
    char dir[LG_PATH_BYTES];
    uint32_t epoch = atomic_load_explicit(&st->board->s->sockets_epoch, memory_order_acquire);
    if (epoch == st->sockets_epoch) return 0;
    st->sockets_epoch = epoch; /* it grows again while a socket is missing */
    if (sockets_are_well(st, dir)) return 0;
    lg_bus_close(&st->bus);
    LG_TRY(lg_path(st->runtime_dir, "%s", dir));
    LG_TRY(lg_path(st->keeper, "%s/keeper", dir));
    LG_TRY(open_bus(st));
    lg_log(LG_INFO, "its socket was removed: bound again in %s", dir);
    return 0;
}

bool lg_stage_should_quit(const lg_stage *st)
{
    return g_terminated || atomic_load_explicit(&st->board->s->quit, memory_order_acquire);
}

static void add_time(_Atomic(uint64_t) *to, int64_t ns)
{
    atomic_fetch_add_explicit(to, (uint64_t)ns, memory_order_relaxed);
}

/* A new keeper knows nothing: every stage deposits what it maps. One that holds other memory under a name
 * has been given that by a process which came first: what this one maps nobody else will ever see, so it
 * ends, and its successor maps the keeper's. */
static int refill_keeper(lg_stage *st)
{
    uint32_t epoch = atomic_load_explicit(&st->board->s->keeper_epoch, memory_order_acquire);
    if (epoch == st->keeper_epoch) return 0;
    for (int i = 0; i < st->n_regions; i++) {
        int rc = lg_region_deposit(st->keeper, st->region[i]);
        if (rc == LG_ERR_MISMATCH) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        if (rc < 0) {
            lg_log_error("cannot deposit a region at the new keeper, will try again");
            return 0;
        }
    }
    st->keeper_epoch = epoch;
    lg_log(LG_INFO, "deposited %d regions at the new keeper", st->n_regions);
    return 0;
}

/* Has every region a second copy? Seen once, it stays so. */
static bool look_for_copies(lg_stage *st)
{
    for (int i = 0; i < st->n_regions && !st->copied; i++)
        if (!lg_region_is_copied(st->region[i])) return false;
    st->copied = true;
    return true;
}

/* Announces that the setup is done, and asks for what is still missing (shm/board.h, rule 9). */
static void announce(lg_stage *st)
{
    uint32_t asks = look_for_copies(st) ? 0 : st->me;
    atomic_store_explicit(&st->row->uncopied, asks, memory_order_release);
    atomic_store_explicit(&st->row->ready, st->me, memory_order_release);
    lg_bus_ready(st->bus);
}

/* One look, then a moment of waiting; lgsup wakes us. Without an lgsup it takes until the next one comes. */
static void wait_for_copies(lg_stage *st)
{
    if (look_for_copies(st)) {
        atomic_store_explicit(&st->row->uncopied, 0, memory_order_release);
        return;
    }
    int64_t start = lg_now_ns();
    st->waiting_for = "copies of its memory";
    lg_board_beat(st->row, LG_PHASE_WAITING);
    lg_bus_wait(st->bus, IDLE_MS);
    add_time(&st->row->wait_ns, lg_now_ns() - start);
}

/* With whom it shares its GPU. */
static void choose_turn(lg_stage *st)
{
    int instances[LG_ROLE_COUNT];
    if (st->turn.error) return;
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        instances[r] = (int)atomic_load_explicit(&st->board->s->wanted[r], memory_order_relaxed);
    int k = lg_plan_turn(st->config, instances, st->role, st->index);
    struct lg_turn_shared *s = k < 0 || k >= LG_TURNS_MAX ? NULL : &st->board->s->turn[k];
    if (s == st->turn.shared) return;
    lg_turn_use(&st->turn, s);
    if (!strcmp(st->config->_turns, "always")) st->turn.worth_ns = 0;
    lg_log(LG_INFO, s ? "takes turns with those on the same device" : "takes no turns any more");
}

static void log_turns(const lg_turn *t)
{
    if (t->had + t->went)
        lg_log(LG_INFO,
               "%" PRIu64 " turns, %.1f s of waiting for them; %" PRIu64
               " times it went on without%s",
               t->had, (double)t->waited_ns / LG_S_NS, t->went,
               t->n_short < LG_TURN_SHORT_MAX ? "" : "; its work is too short for more");
}

/* Instances come and go by `lgsup scale`: listen to those that are there. */
static void follow_members(lg_stage *st)
{
    uint32_t epoch = atomic_load_explicit(&st->board->s->members_epoch, memory_order_acquire);
    if (epoch == st->members_epoch) return;
    st->members_epoch = epoch;
    choose_turn(st);
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++) {
            lg_life life;
            lg_board_life(st->board, (lg_role)r, k, &life);
            if (lg_bus_follow(st->bus, (lg_role)r, k, life != LG_LIFE_NONE) < 0)
                lg_log_error("cannot listen to an instance: its wake-ups come late");
        }
}

static bool told_to_leave(const lg_stage *st)
{
    return atomic_load_explicit(&st->row->leave, memory_order_acquire) == st->me;
}

static bool leaves_now(lg_stage *st)
{
    if (!told_to_leave(st)) return false;
    if (st->role == LG_ROLE_trainer && !lg_trainer_may_leave(st->board, st->index)) return false;
    lg_board_beat(st->row, LG_PHASE_DONE);
    lg_log(LG_INFO, "leaves: another takes the place, or fewer are wanted");
    return true;
}

/* While it was a standby, its words went to a file of their own. */
static void join_log(const lg_stage *st)
{
    char path[LG_PATH_BYTES];
    if (lg_path(path, "%s/logs/%s.%d.log", st->run_dir, lg_role_name(st->role), st->index) < 0)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return;
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    close(fd);
}

static int take_over(lg_stage *st, lg_incarnation as)
{
    int64_t start = lg_now_ns();
    lg_board_vacate(st->board, st->me);
    st->me = as;
    LG_TRY(lg_board_join(st->board, as));
    st->row = lg_board_row(st->board, st->role, st->index);
    LG_ASSERT(row_index(st) == st->index);
    join_log(st);
    lg_bus_close(&st->bus);
    LG_TRY(open_bus(st));
    lg_log(LG_INFO, "took over in %.1f ms", (double)(lg_now_ns() - start) / LG_MS_NS);
    return 0;
}

/* *ret_go: false when it is not wanted any more. */
static int stand_by(lg_stage *st, bool *ret_go)
{
    atomic_store_explicit(&st->row->ready, st->me, memory_order_release);
    lg_bus_ready(st->bus);
    lg_log(LG_INFO, "standby for %s.%d", lg_role_name(st->role), st->index);
    *ret_go = false;
    while (!lg_stage_should_quit(st) && !told_to_leave(st)) {
        lg_incarnation as = atomic_load_explicit(&st->row->takes, memory_order_acquire);
        if (as) {
            *ret_go = true;
            LG_TRY(take_over(st, as));
            return 0;
        }
        lg_board_beat(st->row, LG_PHASE_WAITING);
        LG_TRY(follow_sockets(st));
        LG_TRY(refill_keeper(st));
        lg_bus_wait(st->bus, IDLE_MS);
    }
    return 0;
}

static int loop(lg_stage *st, const struct lg_stage_def *def)
{
    while (!lg_stage_should_quit(st) && !leaves_now(st)) {
        int64_t start = lg_now_ns(), waited = st->turn.waited_ns;
        bool well = !st->turn.error;
        LG_TRY(follow_sockets(st));
        follow_members(st);
        if (!st->copied) {
            wait_for_copies(st);
            LG_TRY(refill_keeper(st));
            continue;
        }
        lg_board_beat(st->row, LG_PHASE_WORKING);
        int rc = def->step(st);
        if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        int64_t worked = lg_now_ns();
        add_time(&st->row->busy_ns, worked - start - (st->turn.waited_ns - waited));
        if (well && st->turn.error)
            lg_log(LG_WARN, "no turns on its device any more: %s", strerror(st->turn.error));
        LG_TRY(refill_keeper(st));
        if (rc == LG_STEP_WORKED) continue;
        lg_board_beat(st->row, rc == LG_STEP_DONE ? LG_PHASE_DONE : LG_PHASE_WAITING);
        lg_bus_wait(st->bus, IDLE_MS);
        if (rc == LG_STEP_IDLE) add_time(&st->row->wait_ns, lg_now_ns() - worked);
    }
    return 0;
}

static int work(lg_stage *st, const struct lg_stage_def *def)
{
    int64_t start = lg_now_ns();
    LG_TRY(attach(st));
    bool standby = row_index(st) != st->index, cold = st->role == LG_ROLE_trainer, go = true;
    if (standby && cold) LG_TRY(stand_by(st, &go));
    if (!go) return 0;
    LG_TRY(def->open(st));
    if (standby && !cold) LG_TRY(stand_by(st, &go));
    if (!go) return 0;
    announce(st);
    lg_log(LG_INFO, "ready after %.1f ms", (double)(lg_now_ns() - start) / LG_MS_NS);
    choose_turn(st);
    LG_TRY(loop(st, def));
    log_turns(&st->turn);
    return 0;
}

static void print_row(cJSON *regions, cJSON *private_bytes, const struct lg_stage_bytes *row)
{
    bool own = !strcmp(row->name, "private");
    cJSON *r = cJSON_CreateObject();
    if (!own) cJSON_AddStringToObject(r, "name", row->name);
    cJSON_AddStringToObject(r, "device", row->device[0] ? row->device : "host");
    cJSON_AddNumberToObject(r, "bytes", (double)row->bytes);
    if (own) cJSON_AddNumberToObject(r, "instances", row->processes);
    if (own && row->activations)
        cJSON_AddNumberToObject(r, "activations", (double)row->activations);
    if (own && row->note[0]) cJSON_AddStringToObject(r, "note", row->note);
    cJSON_AddItemToArray(own ? private_bytes : regions, r);
}

/* What is to be planned. */
struct planning {
    const char *file; /* NULL: nothing */
    bool is_described;
    const char *set[64];
    int n_set;
};

static int print_bytes(const struct lg_stage_def *def, lg_role role, const struct planning *of)
{
    lg_config *config;
    lg_plan plan;
    LG_TRY(lg_config_load(of->file, of->set, of->n_set, &config));
    int rc, n = 0;
    struct lg_stage_bytes *rows = calloc(BYTES_ROWS_MAX, sizeof *rows);
    LG_ASSERT(rows);
    LG_TRY_GOTO(rc, lg_config_check(config), out);
    LG_TRY_GOTO(rc, lg_plan_make(config, NULL, &plan), out);
    plan.is_described = of->is_described;
    LG_TRY_GOTO(rc, def->bytes(config, &plan, role, rows, BYTES_ROWS_MAX, &n), out);
    cJSON *j = cJSON_CreateObject(), *regions = cJSON_AddArrayToObject(j, "regions");
    cJSON *own = cJSON_AddArrayToObject(j, "private");
    for (int i = 0; i < n; i++) print_row(regions, own, &rows[i]);
    cJSON_AddStringToObject(j, "role", lg_role_name(role));
    char *text = cJSON_Print(j);
    cJSON_Delete(j);
    puts(text ? text : "{}");
    free(text);
out:
    free(rows);
    lg_config_free(&config);
    return rc;
}

static int usage(const struct lg_stage_def *def)
{
    const char *p = lg_role_program(def->role);
    return LG_FAIL(LG_ERR_USAGE,
                   "usage: %s --run DIR --index K --incarnation I   (started by lgsup)\n"
                   "       %s --plan CONFIG [--set key=value ...]   (prints the memory it needs)",
                   p, p);
}

static bool may_be(const struct lg_stage_def *def, int role)
{
    return role == (int)def->role ||
           (lg_role_is_text(def->role) && role >= 0 && lg_role_is_text((lg_role)role));
}

static int dispatch(int argc, char **argv, const struct lg_stage_def *def, lg_stage *st)
{
    struct planning plan = {0};
    const char *run = NULL;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!value) return usage(def);
        if (!strcmp(argv[i], "--run"))
            run = value;
        else if (!strcmp(argv[i], "--plan") || !strcmp(argv[i], "--described"))
            plan.file = value, plan.is_described = argv[i][2] == 'd';
        else if (!strcmp(argv[i], "--index"))
            st->index = atoi(value);
        else if (!strcmp(argv[i], "--incarnation"))
            st->me = (lg_incarnation)strtoul(value, NULL, 10);
        else if (!strcmp(argv[i], "--role") && may_be(def, lg_role_find(value)))
            st->role = (lg_role)lg_role_find(value);
        else if (!strcmp(argv[i], "--set") && plan.n_set < (int)LG_ARRAY_LEN(plan.set))
            plan.set[plan.n_set++] = value;
        else
            return usage(def);
        i++;
    }
    if (plan.file) return print_bytes(def, st->role, &plan);
    if (!run || !st->me || st->index < 0 || st->index >= LG_INSTANCES_MAX) return usage(def);
    LG_TRY(lg_path(st->run_dir, "%s", run));
    char name[48];
    const int role = lg_incarnation_row(st->me) / LG_INSTANCES_MAX;
    if (may_be(def, role)) st->role = (lg_role)role;
    snprintf(name, sizeof name, "%s.%d", lg_role_name(st->role), st->index);
    lg_log_set_role(name);
    return work(st, def);
}

int lg_stage_main(int argc, char **argv, const struct lg_stage_def *def)
{
    static lg_stage st;
    struct sigaction terminate = {.sa_handler = on_terminate};
    sigaction(SIGTERM, &terminate, NULL);
    signal(SIGPIPE, SIG_IGN);
    if (lg_raise_open_files() < 0)
        lg_log_error("goes on with few files"); /* lgsup has refused it */
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    st.role = def->role;
    int rc = dispatch(argc, argv, def, &st);
    if (rc < 0) {
        if (st.run_dir[0]) {
            if (st.bus) lg_bus_event(st.bus, LG_ERROR, lg_err_message());
            lg_log_error("ended");
        } else {
            fprintf(stderr, "%s: %s\n", lg_role_program(def->role), lg_err_message());
        }
    }
    if (st.state && def->close) def->close(&st);
    lg_heartbeat_set(NULL, NULL); /* the board is unmapped below */
    for (int i = 0; i < st.n_regions; i++) lg_region_close(&st.region[i]);
    for (int i = 0; i < st.n_devices; i++) lg_device_close(&st.device[i]);
    lg_bus_close(&st.bus);
    lg_board_close(&st.board);
    lg_config_free(&st.config);
    return -rc;
}

int lg_stage_park(lg_stage *st, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(st->row->cause, sizeof st->row->cause, fmt, ap);
    va_end(ap);
    return LG_FAIL(LG_ERR_PARKED, "%s", st->row->cause);
}

int lg_stage_lost(lg_stage *st, const char *fmt, ...)
{
    char what[160];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    atomic_store_explicit(&st->row->lost, st->me, memory_order_release);
    return lg_stage_park(st, "memory of this run is lost: %s", what);
}

int lg_stage_expect(lg_stage *st, const lg_region *r, uint64_t state)
{
    return lg_stage_expect_stamp(st, r->front, r->name, state);
}

int lg_stage_expect_stamp(lg_stage *st, const struct lg_stamp *s, const char *name, uint64_t state)
{
    if (lg_stamp_is(s, state)) return 0;
    return lg_stage_lost_stamp(st, s, name, state);
}

int lg_stage_lost_stamp(lg_stage *st, const struct lg_stamp *s, const char *name, uint64_t state)
{
    const lg_mark of = atomic_load_explicit(&s->of, memory_order_relaxed);
    const lg_mark mark = of & LG_STAMP_MARK;
    if (mark == LG_MARK_NONE)
        return lg_stage_lost(st, "%s does not hold state %" PRIu64 ", but nothing", name, state);
    return lg_stage_lost(st, "%s does not hold state %" PRIu64 ", but %s%" PRIu64, name, state,
                         of == mark ? "" : "a part of ", lg_mark_state(mark));
}

int lg_stage_park_if_lasting(lg_stage *st, int rc, const char *what)
{
    bool may_pass = rc == LG_ERR_IO || rc == LG_ERR_NOSPACE || rc == LG_ERR_TIMEOUT;
    if (rc >= 0) return rc;
    if (may_pass) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return lg_stage_park(st, "%s: %s", what, lg_err_message());
}

uint64_t lg_stage_sample(const lg_stage *st, uint64_t n)
{
    return lg_host_sample(lg_hosts_place(st->board), n);
}

uint64_t lg_stage_end(lg_stage *st)
{
    uint64_t final = st->board->s->max_steps;
    lg_commit_final(st->board, &final);
    return final * st->board->s->batch;
}
