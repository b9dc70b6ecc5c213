/* See memo.h. */
#include "stages/memo.h"
#include "base/bytes.h"
#include "base/log.h"
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

enum { AUTO_SHARE = 64 }; /* of the machine's memory, at most, with "auto" */

size_t lg_stage_memo_bytes(const struct lg_stage_memo_options *o)
{
    size_t bytes;
    LG_ASSERT(lg_memo_parse(o->size, &bytes)); /* lg_config_check */
    if (bytes != SIZE_MAX) return bytes;
    if (!o->of_item) return 0;
    return (size_t)sysconf(_SC_PHYS_PAGES) / AUTO_SHARE * (size_t)sysconf(_SC_PAGESIZE);
}

/* Twice as many places as inputs, so that few are looked for far from where they belong. */
static uint64_t entries_of(lg_stage *st, const struct lg_stage_memo_options *o)
{
    struct lg_data_part part[LG_DATA_PARTS_MAX];
    const int n = lg_data_parts(st->board, part);
    const uint64_t most = lg_memo_entries(lg_stage_memo_bytes(o), o->bytes);
    const uint64_t inputs = n && o->of_item ? part[n - 1].items * o->of_item + 1 : most;
    return LG_MIN(most, 2 * inputs);
}

void lg_stage_memo_open(lg_stage *st, const struct lg_stage_memo_options *o, lg_stage_memo *ret)
{
    const uint64_t entries = entries_of(st, o);
    char name[LG_REGION_NAME_BYTES], text[32];
    *ret = (lg_stage_memo){.is_open = true};
    if (!entries) return;
    snprintf(name, sizeof name, "memo/%s", o->role);
    int rc = lg_region_open(&(struct lg_region_spec){.keeper = st->keeper,
                                                     .name = name,
                                                     .bytes = lg_memo_bytes(entries, o->bytes),
                                                     .plan_hash = st->plan.hash,
                                                     .run_id = st->board->s->preamble.run_id},
                            &ret->region);
    if (rc < 0) {
        lg_log_error("nothing is remembered");
        lg_err_clear();
        return;
    }
    ret->table = lg_memo_over(ret->region->payload, entries, o->bytes);
    lg_log(LG_INFO, "remembers up to %" PRIu64 " inputs, %s", entries,
           lg_bytes_text(ret->region->bytes, text));
}

void lg_stage_memo_close(lg_stage_memo *m, const char *what)
{
    if (m->asked)
        lg_log(LG_INFO, "%" PRIu64 " of %" PRIu64 " %s were remembered", m->found, m->asked, what);
    if (m->region) lg_region_close(&m->region);
    *m = (lg_stage_memo){0};
}

const void *lg_stage_memo_look(lg_stage_memo *m, struct lg_memo_key key)
{
    const void *found = m->table.entries ? lg_memo_find(&m->table, key) : NULL;
    m->asked++;
    m->found += found != NULL;
    return found;
}
