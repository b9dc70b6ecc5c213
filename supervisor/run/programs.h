/* Which program an instance runs, where it is not the one beside lgsup: what `lgsup swap` has put in
 * force. One place: DIR/programs, written by the lgsup in charge alone, before a process of the new
 * program takes over; so it holds after deaths of the instance and of lgsup, and as long as the run's
 * memory lives (it names the board's run). A later start from a checkpoint begins without it. */
#pragma once
#include "base/fs.h"
#include "config/plan.h"

struct lg_program {
    lg_role role;
    int index;
    char *path;   /* absolute; "": the one beside lgsup, again */
    char *former; /* what it replaced; NULL: nothing to go back to */
};

typedef struct lg_programs {
    char file[LG_PATH_BYTES];
    uint64_t run_id;
    struct lg_program *v;
    int n;
} lg_programs;

/* Reads DIR/programs. None, or one of another run: nothing is swapped. Close it with lg_programs_free. */
int lg_programs_load(lg_programs *p, const char *run_dir, uint64_t run_id);
void lg_programs_free(lg_programs *p);
/* The swapped program of an instance, NULL: the one beside lgsup. */
const char *lg_programs_get(const lg_programs *p, lg_role role, int index);
/* From now on; the one in force becomes its former. Call lg_programs_save after the last. */
int lg_programs_set(lg_programs *p, lg_role role, int index, const char *path);
/* Back to the former. False: there is none. Save afterwards. */
bool lg_programs_revert(lg_programs *p, lg_role role, int index);
int lg_programs_save(const lg_programs *p);
/* What it writes. The caller frees it; NULL: no memory. */
char *lg_programs_text(const lg_programs *p, size_t *ret_bytes);
