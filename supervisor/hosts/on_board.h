/* Between group.h and the board's section (shm/hosts.h). */
#pragma once
#include "shm/board.h"
#include "supervisor/hosts/group.h"

void lg_group_read_facts(lg_board *b, struct lg_group_facts *ret);
/* Stores own.epoch. address: (LG_PLACES_MAX) of exchange processes, by place; they listen from `port` on. */
struct lg_group_addresses {
    char (*address)[LG_HOST_ADDRESS_BYTES];
    uint32_t port;
};
void lg_group_write_epoch(lg_board *b, const struct lg_epoch *e,
                          const struct lg_group_addresses *a);
void lg_group_write_votes(lg_board *b, const struct lg_beat *own);
/* What a former lgsup has left; false: it has entered no epoch. */
bool lg_group_read_before(lg_board *b, struct lg_group_before *ret);
