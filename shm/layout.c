/* The layout hash: a table of every offset and size of the shared structures, hashed by structure.
 *
 * A process built from other headers, or with other padding, gets another number and refuses to
 * attach. A new field belongs into its table here. */
#include "shm/layout.h"
#include "base/fs.h"
#include "shm/board.h"
#include "shm/region.h"
#include "shm/window.h"

#define AT(type, field) offsetof(type, field), sizeof(((type *)0)->field)
#define B(field)        AT(struct lg_board_shared, field)
#define R(field)        AT(struct lg_board_row, field)
#define M(field)        AT(struct lg_board_metrics, field)
#define S(field)        AT(struct lg_slot, field)
#define H(field)        AT(struct lg_region_head, field)

static_assert((int)LG_ROLE_COUNT <= (int)LG_ROLES_MAX, "each role has rows");

enum { STRUCTURES = 4, HASH_BITS = 16 };

static const size_t board[] = {
    sizeof(struct lg_board_shared),
    LG_LAYOUT_VERSION,
    LG_VERDICTS,
    LG_VERDICT_BITS,
    LG_INSTANCES_MAX,
    LG_ROLE_COUNT,
    B(preamble),
    B(lineage),
    B(start_step),
    B(max_steps),
    B(batch),
    B(checkpoint_every),
    B(ranks),
    B(sequence),
    B(scatters),
    B(has_ema),
    B(next_counter),
    B(run_state),
    B(drain),
    B(quit),
    B(keeper_epoch),
    B(sockets_epoch),
    B(yield),
    B(memory_kept),
    B(members_epoch),
    B(wanted),
    B(cause),
    B(verdict),
    B(metrics),
    B(data),
    B(data.known),
    B(data.n_known),
    B(data.may_change),
    B(data.hash),
    B(data.items),
    B(data.tokenizer),
    B(data.changed),
    B(hosts),
    B(hosts.count),
    B(hosts.host),
    B(hosts.life),
    B(hosts.comes),
    B(hosts.epoch),
    B(hosts.lost),
    B(hosts.of),
    B(hosts.card),
    B(hosts.vote),
    B(hosts.vote_at),
    B(hosts.heard_ns),
    sizeof(struct lg_hosts_record),
    AT(struct lg_hosts_record, formation),
    AT(struct lg_hosts_record, members),
    AT(struct lg_hosts_record, leader),
    AT(struct lg_hosts_record, member),
    AT(struct lg_host_member, port),
    AT(struct lg_host_member, life),
    AT(struct lg_host_card, said_in),
    AT(struct lg_host_card, commit),
    AT(struct lg_host_card, exchanged),
    AT(struct lg_host_card, published),
    AT(struct lg_host_card, asks),
    AT(struct lg_host_card, info),
    B(turn),
    B(row),
    sizeof(struct lg_board_metrics),
    M(step),
    M(loss),
    M(loss_vb),
    M(has_vb),
    M(grad_norm),
    M(lr),
    M(samples_per_s),
    M(data_wait_s),
    M(voids),
    M(skipped),
    AT(struct lg_turn_shared, mutex),
    AT(struct lg_turn_shared, hold),
};
static const size_t row[] = {
    sizeof(struct lg_board_row),
    LG_LIFE_RUNNING,
    LG_LIFE_DEAD,
    LG_PHASE_DONE,
    R(life),
    R(pid),
    R(restarts),
    R(start_time),
    R(heartbeat_ns),
    R(phase),
    R(ready),
    R(leave),
    R(standby),
    R(takes),
    R(uncopied),
    R(lost),
    R(commit),
    R(grads),
    R(partial),
    R(given),
    R(added),
    R(lives),
    R(joined),
    R(sent),
    R(made),
    R(local),
    R(exchanged),
    R(fetched),
    R(entered),
    R(staged),
    R(staged_moments),
    R(published),
    R(sum_squares),
    R(loss_so_far),
    R(loss_sum),
    R(samples),
    R(busy_ns),
    R(wait_ns),
    R(cause),
};
static const size_t slot[] = {
    sizeof(struct lg_slot),
    LG_FIELD_COUNT,
    S(ready),
    S(claim),
    S(item),
    S(key_hash),
    S(label),
    S(text_length),
    S(is_void),
    S(is_absent),
    S(bucket),
    S(original_height),
    S(original_width),
    S(crop_top),
    S(crop_left),
};
static const size_t head[] = {
    sizeof(struct lg_region_head),
    LG_PAGE_BYTES,
    H(magic),
    H(version),
    H(layout_hash),
    H(bytes),
    H(plan_hash),
    H(run_id),
    H(name),
    H(filler),
    H(filled),
    H(front_bytes),
    H(place),
    H(made),
    H(copied),
};

static const struct {
    const char *name;
    const size_t *table;
    size_t bytes;
} structure[STRUCTURES] = {
    {"lg_board_shared", board, sizeof board},
    {"lg_board_row", row, sizeof row},
    {"lg_slot", slot, sizeof slot},
    {"lg_region_head", head, sizeof head},
};

uint64_t lg_layout_hash(void)
{
    uint64_t h = 0;
    for (int i = 0; i < STRUCTURES; i++) {
        uint64_t part = lg_hash(structure[i].table, structure[i].bytes) >> (64 - HASH_BITS);
        h |= part << (i * HASH_BITS);
    }
    return h;
}

const char *lg_layout_difference(uint64_t a, uint64_t b)
{
    for (int i = 0; i < STRUCTURES; i++)
        if (((a ^ b) >> (i * HASH_BITS)) & 0xffff) return structure[i].name;
    return NULL;
}
