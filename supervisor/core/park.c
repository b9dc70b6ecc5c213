/* The memory of a parked run; see park.h. */
#include "supervisor/core/park.h"
#include "supervisor/views/status.h"

/* A stage has found it so (shm/board.h, rule 10), or lgsup has. */
bool lg_park_is_lost(const lg_keep *k, const lg_board *b)
{
    for (int r = 0; r < LG_ROWS; r++)
        if (atomic_load_explicit(&b->s->row[r].lost, memory_order_acquire)) return true;
    return k->lost;
}

bool lg_park_may_keep(const lg_keep *k, lg_board *b)
{
    /* What one of several hosts keeps is of a state that the others leave behind. */
    return !lg_park_is_lost(k, b) && !k->service && lg_status_step(b) > b->s->start_step &&
           !lg_hosts_are_several(b);
}

int lg_park_open(const char *dir, lg_board **ret)
{
    char path[LG_PATH_BYTES];
    int rc = lg_path(path, "%s/board", dir);
    if (rc == 0) rc = lg_path_exists(path) ? lg_board_open(path, 0, ret) : LG_ERR_NOTFOUND;
    if (rc == 0 && atomic_load(&(*ret)->s->run_state) != LG_RUN_PARKED) {
        lg_board_close(ret);
        rc = LG_ERR_NOTFOUND;
    }
    lg_err_clear();
    return rc < 0 ? LG_ERR_NOTFOUND : 0;
}

bool lg_park_is_kept(const char *dir, uint64_t *ret_step)
{
    lg_board *b = NULL;
    if (lg_park_open(dir, &b) < 0) return false;
    bool kept =
        atomic_load(&b->s->memory_kept) && lg_status_row_alive(lg_board_row(b, LG_ROLE_keeper, 0));
    if (kept && ret_step) *ret_step = lg_status_step(b);
    lg_board_close(&b);
    return kept;
}

void lg_park_reopen(lg_board *b)
{
    struct lg_board_shared *s = b->s;
    s->cause[0] = 0;
    atomic_store(&s->memory_kept, 0);
    atomic_store(&s->data.changed, 0); /* a loader looks again */
    atomic_store(&s->drain, 0);
    atomic_store(&s->yield, 0);
    atomic_store(&s->quit, 0);
    atomic_store(&s->run_state, LG_RUN_STARTING); /* last */
}
