/* See shm_fixture.h. */
#include "tests/unit/shm_fixture.h"
#include "base/fs.h"
#include "shm/keeper.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { END_MS_MAX = 10000 };

void shm_fixture_open(struct shm_fixture *f, int ranks)
{
    memset(f, 0, sizeof *f);
    scratch_folder(f->dir);
    snprintf(f->board_path, sizeof f->board_path, "%s/board", f->dir);
    snprintf(f->keeper, sizeof f->keeper, "%s/keeper", f->dir);
    f->plan = (lg_plan){.batch = 4, .sequence = 1, .window_slots = 16, .hash = 0x1234};
    f->plan.instances[LG_ROLE_trainer] = ranks;
    f->plan.instances[LG_ROLE_ema] = 1;
    f->plan.instances[LG_ROLE_ckpt] = 1;
    struct lg_board_spec spec = {.plan = &f->plan, .max_steps = 10, .checkpoint_every = 3};
    LG_ASSERT(lg_board_create(f->board_path, &spec, &f->board) == 0);
}

void shm_fixture_start_keeper(struct shm_fixture *f)
{
    int ready[2];
    char byte;
    LG_ASSERT(pipe(ready) == 0);
    f->keeper_pid = fork();
    LG_ASSERT(f->keeper_pid >= 0);
    if (f->keeper_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nothing behind */
        close(ready[0]);
        scratch_exit(lg_keeper_serve(f->keeper, ready[1]) < 0);
    }
    close(ready[1]);
    LG_ASSERT(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
}

void shm_fixture_kill_keeper(struct shm_fixture *f)
{
    if (!f->keeper_pid) return;
    kill(f->keeper_pid, SIGKILL);
    waitpid(f->keeper_pid, NULL, 0);
    f->keeper_pid = 0;
}

int shm_fixture_await_keeper(struct shm_fixture *f)
{
    int status = -1;
    for (int i = 0; i < END_MS_MAX; i++, usleep(1000))
        if (waitpid(f->keeper_pid, &status, WNOHANG) != 0) {
            f->keeper_pid = 0;
            return status;
        }
    shm_fixture_kill_keeper(f);
    return -1;
}

void shm_fixture_end_keeper(struct shm_fixture *f)
{
    if (!f->keeper_pid) return;
    kill(f->keeper_pid, SIGTERM);
    LG_ASSERT(shm_fixture_await_keeper(f) == 0);
}

int shm_fixture_memory(const char *text)
{
    int fd = memfd_create("test", MFD_CLOEXEC);
    LG_ASSERT(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    return fd;
}

int shm_fixture_put(const struct shm_fixture *f, const char *name, const char *text)
{
    int fd = shm_fixture_memory(text), rc = lg_keeper_put(f->keeper, name, strlen(text), fd);
    close(fd);
    return rc > 0 ? 0 : rc;
}

bool shm_fixture_holds(const struct shm_fixture *f, const char *name, const char *text)
{
    int fd;
    uint64_t bytes;
    char got[64] = {0};
    if (lg_keeper_get(f->keeper, name, &bytes, &fd) < 0) return false;
    bool same = bytes == strlen(text) && (fcntl(fd, F_GETFD) & FD_CLOEXEC) &&
                pread(fd, got, sizeof got - 1, 0) == (ssize_t)bytes && strcmp(got, text) == 0;
    close(fd);
    return same;
}

bool shm_fixture_lacks(const struct shm_fixture *f, const char *name)
{
    int fd;
    uint64_t bytes;
    return lg_keeper_get(f->keeper, name, &bytes, &fd) == LG_ERR_NOTFOUND;
}

void shm_fixture_close(struct shm_fixture *f)
{
    shm_fixture_end_keeper(f);
    lg_board_close(&f->board);
    lg_remove_tree(f->dir);
}

lg_incarnation shm_fixture_join(lg_board *b, lg_role role, int index)
{
    lg_incarnation me = lg_board_enlist(b, role, index);
    LG_ASSERT(lg_board_join(b, me) == 0);
    return me;
}
