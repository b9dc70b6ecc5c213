/* Episodes in which somebody else changes files that the run believes in: sockets are removed, the data
 * set changes, another run's files take the place of the run's own, or another build's board does.
 *
 * Either the run goes on as if nothing were (sockets), or it refuses, says why, and has touched nothing:
 * then the files are put back, lgsup is started again, and the end is that of an undisturbed run. */
#include "base/clock.h"
#include "tests/chaos/chaos.h"
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    BACK_MS_MAX = 30000,    /* until a killed process is replaced, lgsup too */
    REFUSAL_MS_MAX = 30000, /* until a start that must not be is refused */
    PARK_MS_MAX = 60000,    /* until what is loaded already has been trained on */
    DEAD_MS_MAX = 10000,
    STEPS_LEFT_MIN = 100,
    COPY_MS_MAX = 60000,
    TAR_BYTES_MAX = 256 << 20,
    BLOCK = 512
};

int chaos_copy(const char *from, const char *to)
{
    char *argv[] = {(char *)"/bin/cp", (char *)"-a", (char *)from, (char *)to, NULL};
    return chaos_execute(argv, "/dev/null", COPY_MS_MAX) == 0 ? 0 : -1;
}

/* Refused means: lgsup has ended by itself, not well, and its first error names what is wrong. */
static void check_refusal(struct chaos_run *r, const char *what, const char *named)
{
    char words[700];
    chaos_first_error(r, words, sizeof words);
    if (r->code != 0 && r->code < 128 && strstr(words, named)) return;
    chaos_fail(r, "%s: %s was not refused: lgsup ended with %d: %.300s",
               chaos_fault_name[r->episode.fault], what, r->code, words);
}

/* A power cut: nobody is left, not even who was too new to stand on the board. */
static bool all_dead(struct chaos_run *r)
{
    int pid[CHAOS_STOPPED_MAX], n = chaos_children(getpid(), pid, CHAOS_STOPPED_MAX);
    for (int i = 0; i < n; i++) kill(pid[i], SIGKILL);
    return r->episode.ended && n == 0;
}

static void start_again(struct chaos_run *r)
{
    r->episode.ended = false;
    r->start_at_ns = 0;
}

/* ---- sockets ---- */

static int runtime_dir(const struct chaos_run *r, char ret[LG_PATH_BYTES])
{
    char record[LG_PATH_BYTES + 16], *text;
    size_t n;
    snprintf(record, sizeof record, "%s/runtime", r->dir);
    if (lg_read_file(record, LG_PATH_BYTES - 1, &text, &n) < 0) {
        lg_err_clear();
        return -1;
    }
    text[strcspn(text, "\n")] = 0;
    snprintf(ret, LG_PATH_BYTES, "%s", text);
    free(text);
    return ret[0] == '/' ? 0 : -1;
}

static void empty_dir(const char *path)
{
    char entry[LG_PATH_BYTES];
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") &&
            lg_path(entry, "%s/%s", path, e->d_name) == 0)
            lg_remove_tree(entry);
    if (dir) closedir(dir);
    lg_err_clear();
}

/* The sockets, their directory, or all that logind would remove with the user's last session; with
 * lgsup alive, or dead and started behind it. */
bool chaos_begin_sockets(struct chaos_run *r, int64_t now)
{
    char dir[LG_PATH_BYTES];
    struct chaos_victim v;
    if (runtime_dir(r, dir) < 0) return false;
    int what = (int)chaos_draw(r, 3);
    bool kill_lgsup = chaos_draw(r, 3) == 0;
    if (kill_lgsup && !chaos_find_victim(r, LG_ROLE_lgsup, 0, &v)) return false;
    if (what == 0)
        empty_dir(dir);
    else
        lg_remove_tree(what == 1 ? dir : r->runtime);
    lg_err_clear();
    chaos_note(r, CHAOS_sockets, -1, 0);
    if (kill_lgsup) chaos_kill_all(r, CHAOS_sockets, &v, 1);
    chaos_episode_next(r, now, BACK_MS_MAX);
    if (!kill_lgsup) r->episode.todo = 1;
    return true;
}

void chaos_follow_sockets(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    if (chaos_run_id(r->board) != e->run_id)
        chaos_fail(r, "sockets: they were removed, and the run has lost its memory");
    if (e->phase == 1) { /* lgsup is back, then somebody who needs sockets is to come */
        if (!e->todo && r->spoke_ns < e->began_ns) {
            if (!chaos_is_final(r)) chaos_episode_late(r, now, "lgsup did not take the run over");
            return;
        }
        if (!chaos_episode_kill(r, chaos_draw(r, 4) ? LG_ROLE_ckpt : LG_ROLE_keeper)) return;
        chaos_episode_next(r, now, BACK_MS_MAX);
    } else if (chaos_episode_is_replaced(r) || chaos_is_final(r)) {
        chaos_episode_over(r);
    } else {
        chaos_episode_late(r, now, "a killed process was not replaced");
    }
}

/* ---- the data set ---- */

static int first_shard(const char *dir, char ret[LG_PATH_BYTES])
{
    char name[256] = "";
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        if (n < 5 || strcmp(e->d_name + n - 4, ".tar")) continue;
        if (!name[0] || strcmp(e->d_name, name) < 0) snprintf(name, sizeof name, "%s", e->d_name);
    }
    if (d) closedir(d);
    return name[0] ? lg_path(ret, "%s/%s", dir, name) : -1;
}

/* Where the last sample's members begin: those whose names agree up to the dot. */
static size_t last_sample(const char *tar, size_t bytes)
{
    size_t last = 0;
    for (size_t at = 0; at + BLOCK <= bytes && tar[at];) {
        size_t size = strtoull(tar + at + 124, NULL, 8), stem = strcspn(tar + at, ".");
        if (strncmp(tar + at, tar + last, stem + 1) != 0) last = at;
        at += BLOCK + (size + BLOCK - 1) / BLOCK * BLOCK;
    }
    return last;
}

/* One sample less, as a new file: who has the old one open keeps it. */
static int shorten(const char *path)
{
    static const char end[2 * BLOCK];
    char *tar;
    size_t bytes, keep;
    LG_TRY(lg_read_file(path, TAR_BYTES_MAX, &tar, &bytes));
    keep = last_sample(tar, bytes);
    memcpy(tar + keep, end, LG_MIN(sizeof end, bytes - keep));
    int rc = keep ? lg_publish_file(path, tar, LG_MIN(keep + sizeof end, bytes)) : -1;
    free(tar);
    return rc;
}

int chaos_change_data(const char *dir, bool add)
{
    char shard[LG_PATH_BYTES], more[LG_PATH_BYTES];
    LG_TRY(first_shard(dir, shard));
    if (!add) return shorten(shard);
    LG_TRY(lg_path(more, "%s/zz-more.tar", dir));
    return chaos_copy(shard, more);
}

int chaos_restore_data(const struct chaos_run *r)
{
    lg_remove_tree(r->data);
    lg_err_clear();
    return chaos_copy(r->o->data, r->data);
}

static void change_data(struct chaos_run *r)
{
    if (chaos_change_data(r->data, chaos_draw(r, 2)) < 0)
        chaos_fail(r, "data_set: the driver could not change it");
    lg_err_clear();
}

bool chaos_begin_data_set(struct chaos_run *r, int64_t now)
{
    struct chaos_victim v;
    if (chaos_steps_left(r) < STEPS_LEFT_MIN) return false;
    r->episode.todo = chaos_draw(r, 3) == 0 && chaos_has_published(r); /* all die; else a loader */
    if (r->episode.todo) {
        if (!chaos_strike_power(r, CHAOS_data_set)) return false;
        chaos_episode_next(r, now, DEAD_MS_MAX);
    } else {
        if (!chaos_may_die(r, LG_ROLE_loader) || !chaos_find_victim(r, LG_ROLE_loader, 0, &v))
            return false;
        change_data(r);
        chaos_kill_all(r, CHAOS_data_set, &v, 1);
        chaos_episode_next(r, now, 0);
        chaos_episode_next(r, now, PARK_MS_MAX);
    }
    r->episode.takes_end = true;
    return true;
}

void chaos_follow_data_set(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    if (e->phase == 1) {
        if (all_dead(r)) {
            change_data(r);
            start_again(r);
            chaos_episode_next(r, now, REFUSAL_MS_MAX);
        } else {
            chaos_episode_late(r, now, "what was killed did not end");
        }
    } else if (e->ended) {
        check_refusal(r, "a changed data set", "the data set has changed");
        if (chaos_restore_data(r) < 0) chaos_fail(r, "data_set: the driver could not restore it");
        r->refused_in_row = 0;
        chaos_note(r, CHAOS_data_set, -1, 0);
        chaos_episode_over(r);
    } else {
        chaos_episode_late(r, now, "a changed data set was not refused");
    }
}

/* ---- another run's files ---- */

/* Its checkpoints alone, or the whole directory. */
static void paths(const struct chaos_run *r, char ours[LG_PATH_BYTES], char away[LG_PATH_BYTES],
                  char others[LG_PATH_BYTES])
{
    const char *part = r->episode.todo ? "/checkpoints" : "";
    LG_ASSERT(lg_path(ours, "%s%s", r->dir, part) == 0 && lg_path(away, "%s.away", r->dir) == 0 &&
              lg_path(others, "%s/other%s", r->o->home, part) == 0);
}

bool chaos_begin_folder(struct chaos_run *r, int64_t now)
{
    if (!chaos_has_published(r) || !chaos_strike_power(r, CHAOS_folder)) return false;
    r->episode.todo = (int)chaos_draw(r, 2);
    r->episode.takes_end = true;
    chaos_episode_next(r, now, DEAD_MS_MAX);
    return true;
}

static void put_other(struct chaos_run *r)
{
    char ours[LG_PATH_BYTES], away[LG_PATH_BYTES], others[LG_PATH_BYTES];
    paths(r, ours, away, others);
    lg_remove_tree(away);
    if (rename(ours, away) < 0 || chaos_copy(others, ours) < 0)
        chaos_fail(r, "folder: the driver could not replace %.300s", ours);
}

/* What another run has published is as it was. */
static void put_back(struct chaos_run *r)
{
    char ours[LG_PATH_BYTES], away[LG_PATH_BYTES], others[LG_PATH_BYTES], why[400];
    const char *part = r->episode.todo ? "" : "/checkpoints";
    char here[LG_PATH_BYTES], there[LG_PATH_BYTES];
    paths(r, ours, away, others);
    LG_ASSERT(lg_path(here, "%s%s", ours, part) == 0 && lg_path(there, "%s%s", others, part) == 0);
    if (chaos_same_tree(there, here, why, sizeof why) < 0)
        chaos_fail(r, "folder: the other run's checkpoints were touched: %.300s", why);
    if (r->why[0]) return; /* for whoever looks for the reason */
    lg_remove_tree(ours);
    if (rename(away, ours) < 0) chaos_fail(r, "folder: the driver could not put %.300s back", ours);
}

void chaos_follow_folder(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    if (e->phase == 1) {
        if (all_dead(r)) {
            put_other(r);
            start_again(r);
            chaos_episode_next(r, now, REFUSAL_MS_MAX);
        } else {
            chaos_episode_late(r, now, "what was killed did not end");
        }
    } else if (!e->ended) {
        chaos_episode_late(r, now, "another run's files were not refused");
    } else if (e->phase == 2 && r->code == -LG_ERR_PARKED) { /* what it has kept is of no use */
        e->child = chaos_stop_lgsup(r);
        chaos_episode_next(r, now, DEAD_MS_MAX);
    } else if (e->child) {
        chaos_episode_late(r, now, "`lgsup stop` did not end what a refused start has kept");
    } else {
        check_refusal(r,
                      e->todo ? "a start from another run's checkpoints"
                              : "a start in another run's directory",
                      "the data set has changed");
        put_back(r);
        r->refused_in_row = 0;
        chaos_note(r, CHAOS_folder, -1, 0);
        chaos_episode_over(r);
    }
    lg_err_clear();
}

/* ---- another build's board ---- */

static void board_paths(const struct chaos_run *r, char board[LG_PATH_BYTES],
                        char away[LG_PATH_BYTES])
{
    LG_ASSERT(lg_path(board, "%s/board", r->dir) == 0 &&
              lg_path(away, "%s/board.away", r->dir) == 0);
}

static int make_other_board(struct chaos_run *r)
{
    char board[LG_PATH_BYTES], away[LG_PATH_BYTES];
    uint64_t word;
    off_t at = chaos_draw(r, 2) ? offsetof(struct lg_board_shared, preamble.version)
                                : offsetof(struct lg_board_shared, preamble.layout_hash);
    board_paths(r, board, away);
    if (rename(board, away) < 0 || chaos_copy(away, board) < 0) return -1;
    int fd = open(board, O_RDWR | O_CLOEXEC);
    bool ok = fd >= 0 && pread(fd, &word, sizeof word, at) == sizeof word;
    word++;
    ok = ok && pwrite(fd, &word, sizeof word, at) == sizeof word;
    if (fd >= 0) close(fd);
    return ok ? 0 : -1;
}

bool chaos_begin_other_build(struct chaos_run *r, int64_t now)
{
    struct chaos_victim v;
    if (!chaos_find_victim(r, LG_ROLE_lgsup, 0, &v)) return false;
    chaos_kill_all(r, CHAOS_other_build, &v, 1);
    r->episode.takes_end = true;
    chaos_episode_next(r, now, DEAD_MS_MAX);
    return true;
}

/* Behind the last step a process has nothing left to do, and lgsup may have told it to go before it was killed. */
static void remember_living(struct chaos_run *r)
{
    for (int i = 0; i < LG_ROLE_lgsup * LG_INSTANCES_MAX; i++) {
        const lg_role role = (lg_role)(i / LG_INSTANCES_MAX);
        lg_life life;
        lg_incarnation one = lg_board_life(r->board, role, i % LG_INSTANCES_MAX, &life);
        bool goes = atomic_load(&r->board->s->quit) ||
                    atomic_load(&lg_board_row(r->board, role, i % LG_INSTANCES_MAX)->phase) ==
                        LG_PHASE_DONE;
        r->episode.living[i] =
            life == LG_LIFE_RUNNING && !goes && !lg_board_is_dead(r->board, one) ? one : 0;
    }
}

static void check_living(struct chaos_run *r)
{
    for (int i = 0; i < LG_ROLE_lgsup * LG_INSTANCES_MAX; i++)
        if (r->episode.living[i] && lg_board_is_dead(r->board, r->episode.living[i]))
            chaos_fail(r, "other_build: %s.%d died of a start that was refused",
                       lg_role_name((lg_role)(i / LG_INSTANCES_MAX)), i % LG_INSTANCES_MAX);
}

static bool has_ended(const struct chaos_run *r)
{
    return r->code == 0 || atomic_load(&r->board->s->run_state) >= LG_RUN_DONE;
}

void chaos_follow_other_build(struct chaos_run *r, int64_t now)
{
    struct chaos_episode *e = &r->episode;
    char board[LG_PATH_BYTES], away[LG_PATH_BYTES];
    if (!e->ended) {
        chaos_episode_late(r, now,
                           e->phase == 1 ? "a killed lgsup did not end"
                                         : "another build's board was not refused");
    } else if (e->phase == 1 && has_ended(r)) { /* the board of such a run keeps nobody out */
        r->done = r->code == 0;
        chaos_episode_over(r);
    } else if (e->phase == 1) {
        remember_living(r);
        if (make_other_board(r) < 0) chaos_fail(r, "other_build: the driver could not make it");
        start_again(r);
        chaos_episode_next(r, now, REFUSAL_MS_MAX);
    } else {
        check_refusal(r, "a start over another build's board", "board");
        check_living(r);
        board_paths(r, board, away);
        if (!r->why[0] && rename(away, board) < 0)
            chaos_fail(r, "other_build: the driver could not put the board back");
        chaos_episode_over(r);
    }
    lg_err_clear();
}
