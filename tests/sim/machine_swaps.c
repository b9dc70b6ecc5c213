/* Orders of `lgsup swap`, and what must hold of them; see supervisor.h.
 *
 * may_run says what lgsup may start an instance with: one program while no swap is under way; both,
 * from the order until its answer; one again after the answer; both after a death of lgsup between,
 * when DIR/programs decides. */
#include "supervisor/run/programs.h"
#include "tests/sim/machine.h"
#include <stdio.h>
#include <string.h>

enum { RANK_STEPS_MAX = 3 }; /* after it was told to leave; lgsup may stutter meanwhile */

static const char *const g_path[] = {
#define X(name) "/programs/" #name,
    PROGRAMS(X)
#undef X
};

const char *program_path(enum program p)
{
    return g_path[p];
}

enum program program_of_path(const char *path)
{
    int p = 0;
    while (p < PROGRAM_COUNT && strcmp(path, g_path[p])) p++;
    return (enum program)p;
}

/* Of a role that the run has; mostly good programs. While a checkpoint is written mostly of its
 * writer. */
void draw_swap(void)
{
    struct world *w = &g.w;
    if (g.crash_role >= 0) return; /* the run is parked at the first that does not start */
    const struct actor *a = &w->actor[sim_random(w, (uint64_t)w->n_actors)];
    lg_role role = w->writing && sim_random(w, 4) ? LG_ROLE_ckpt : a->role;
    bool one = sim_random(w, 3) == 0;
    enum program p = (enum program)sim_random(w, sim_random(w, 2) ? 3 : PROGRAM_COUNT);
    struct letter l = {.due_ns = g.now_ns,
                       .id = ++g.last_order,
                       .m = {.kind = LG_MESSAGE_swap,
                             .role = role,
                             .index = one && role == a->role ? a->index : 0,
                             .level = one}};
    if (sim_random(w, 6)) snprintf(l.m.text, sizeof l.m.text, "%s", g_path[p]);
    send_letter(&l);
}

static bool concerns(const struct order *o, const struct proc *p)
{
    return o->id && o->role == p->role && o->concerns[p->index];
}

void order_received(const struct letter *l)
{
    struct order *o = g.order[0].id ? &g.order[1] : &g.order[0];
    const struct lg_message *m = &l->m;
    LG_ASSERT(!o->id);
    *o = (struct order){.id = l->id, .role = m->role, .serial = g.serial};
    o->programs = *m->text ? 1u << program_of_path(m->text) : g.may_run[m->role][m->index];
    for (int k = 0; k < LG_INSTANCES_MAX; k++) {
        lg_life life;
        lg_board_life(&g.w.board, m->role, k, &life);
        o->concerns[k] = m->level ? k == m->index : life != LG_LIFE_NONE;
        o->before[k] = g.may_run[m->role][k];
        o->leaving[k] = atomic_load(&lg_board_row(&g.w.board, m->role, k)->leave);
        if (o->concerns[k]) g.may_run[m->role][k] |= o->programs;
    }
    g.result->swap_orders++;
    g.result->swaps_in_write += m->role == LG_ROLE_ckpt && g.w.writing;
}

/* Processes whose row says that they are the instance. */
static bool fills_row(const struct proc *p)
{
    return is_member(p) && lg_board_life(&g.w.board, p->role, p->index, NULL) == p->me;
}

static void check_all_run(const struct order *o, bool swapped)
{
    const char *after = swapped ? "carried out" : "refused or rolled back";
    for (int i = 0; i < PROCS_MAX; i++) {
        const struct proc *p = &g.proc[i];
        if (!concerns(o, p) || !lives(p)) continue;
        if (!fills_row(p)) continue;
        if (swapped && p->as_standby && p->serial > o->serial && p->state != UP_READY)
            sim_fail(&g.w, "%s.%d does not work yet after a swap that was %s",
                     lg_role_name(p->role), p->index, after);
        if (!(g.may_run[p->role][p->index] >> p->program & 1))
            sim_fail(&g.w, "%s.%d runs %s after a swap that was %s", lg_role_name(p->role),
                     p->index, g_path[p->program], after);
    }
}

/* An answer tells what a later lgsup starts, too: what DIR/programs says. */
static void check_written(const struct order *o, bool swapped, const char *text)
{
    /* Of a swap that was begun. At the run's end, when a program ends with 0, too, the disk is waited for elsewhere; may_run has what a
     * file that could not be written may say. */
    if (!swapped && !strstr(text, "goes on with its former program")) return;
    if (strstr(text, "because the run ends") || strstr(text, ": exit 0")) return;
    lg_programs p;
    const int rc = lg_programs_load(&p, "/nowhere", g.w.board.s->preamble.run_id);
    LG_ASSERT(rc == 0);
    for (int k = 0; k < LG_INSTANCES_MAX; k++) {
        const char *path = lg_programs_get(&p, o->role, k);
        const enum program is = path && *path ? program_of_path(path) : PROGRAM_beside;
        if (o->concerns[k] && !(g.may_run[o->role][k] >> is & 1))
            sim_fail(&g.w, "DIR/programs has %s for %s.%d when a swap is answered as %s",
                     g_path[is], lg_role_name(o->role), k, swapped ? "carried out" : "rolled back");
    }
    lg_programs_free(&p);
}

void order_answered(uint64_t id, const struct lg_message *m)
{
    struct order *o = g.order[0].id == id ? &g.order[0] : &g.order[1];
    bool swapped = m->kind == LG_MESSAGE_ok;
    if (o->id != id) sim_fail(&g.w, "a swap is answered twice");
    for (int k = 0; k < LG_INSTANCES_MAX; k++) {
        if (!o->concerns[k]) continue;
        g.may_run[o->role][k] = swapped ? o->programs : o->before[k];
        if (o->unsaved) g.may_run[o->role][k] |= o->programs | o->before[k];
    }
    check_all_run(o, swapped);
    check_written(o, swapped, m->text);
    uint32_t never = 1u << PROGRAM_missing | 1u << PROGRAM_other_layout;
    if (swapped && (o->programs & never) == o->programs)
        sim_fail(&g.w, "a program that cannot run was swapped in");
    if (swapped)
        g.result->swaps[o->role]++;
    else
        g.result->swap_errors++;
    *o = (struct order){0};
}

void orders_forgotten(void)
{
    g.result->swap_deaths += g.order[0].id != 0;
    memset(g.order, 0, sizeof g.order);
}

void orders_unsaved(void)
{
    g.order[0].unsaved = g.order[1].unsaved = true;
}

const struct order *order_of(lg_role role)
{
    for (int i = 0; i < 2; i++)
        if (g.order[i].id && g.order[i].role == role) return &g.order[i];
    return NULL;
}

bool may_be_rolled_back(const struct proc *p)
{
    const struct order *o = order_of(p->role);
    if (p->as_standby && !is_member(p)) return true;
    return o && concerns(o, p) && p->serial > o->serial;
}

void check_program(const struct proc *p)
{
    const struct order *o = order_of(p->role);
    /* A loader or encoder gets the next free row while the one that was scaled away still leaves. */
    if (!actor_of(p) && (p->role > LG_ROLE_vae || !sim_add_actor(&g.w, p->role, p->index)))
        sim_fail(&g.w, "%s.%d is started, which the run does not have", lg_role_name(p->role),
                 p->index);
    if (p->as_standby && !(o && concerns(o, p) && o->programs >> p->program & 1))
        sim_fail(&g.w, "%s.%d gets a successor, %s, that nobody has ordered", lg_role_name(p->role),
                 p->index, g_path[p->program]);
    if (!p->as_standby && !(g.may_run[p->role][p->index] >> p->program & 1))
        sim_fail(&g.w, "%s.%d is started with %s, which is not in force", lg_role_name(p->role),
                 p->index, g_path[p->program]);
}

void check_rank_leaves(struct proc *p)
{
    const struct lg_board_row *row = lg_board_row(&g.w.board, p->role, p->index);
    if (p->role != LG_ROLE_trainer || atomic_load(&row->leave) != p->me) return;
    lg_mark commit = atomic_load(&row->commit);
    unsigned now = g.generation + 1;
    if (p->told_by != now || p->told_at == LG_MARK_NONE)
        p->told_at = commit; /* none: no step yet */
    p->told_by = now;
    if (commit > p->told_at + RANK_STEPS_MAX)
        sim_fail(&g.w, "%s.%d goes on for %d steps after it was told to leave",
                 lg_role_name(p->role), p->index, RANK_STEPS_MAX + 1);
}

void check_successor(const struct proc *p)
{
    const struct order *o = order_of(p->role);
    if (!o || !concerns(o, p) || o->leaving[p->index] == p->me) return;
    for (int i = 0; i < PROCS_MAX; i++) {
        const struct proc *q = &g.proc[i];
        bool beside = lives(q) && q->as_standby && !is_member(q) && q->role == p->role;
        if (beside && q->index == p->index && q->parent == g.generation && q->state != STANDBY)
            sim_fail(&g.w, "%s.%d is told to leave before its successor is ready",
                     lg_role_name(p->role), p->index);
    }
}

void check_orders(void)
{
    if (g.order[0].id || g.order[1].id) sim_fail(&g.w, "a swap is never answered");
    for (int r = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < LG_INSTANCES_MAX; k++) {
            lg_life life;
            lg_board_life(&g.w.board, (lg_role)r, k, &life);
            if (life != LG_LIFE_NONE && !actor_of(&(struct proc){.role = (lg_role)r, .index = k}))
                sim_fail(&g.w, "row %s.%d, where a standby was, is left as it was",
                         lg_role_name((lg_role)r), k);
        }
}
