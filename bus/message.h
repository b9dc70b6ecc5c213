/* A message on the line between lgsup, the stages and the command line: one msgpack array
 *
 *     [version, kind, role, index, incarnation, level, text]
 *
 * of at most LG_MESSAGE_BYTES bytes. Reading allocates nothing and refuses whatever is longer, out
 * of range or followed by more bytes, so a peer can send what it likes. */
#pragma once
#include "config/plan.h"
#include "shm/layout.h"

enum { LG_MESSAGE_VERSION = 1, LG_MESSAGE_TEXT_MAX = 400, LG_MESSAGE_BYTES = 512 };

typedef enum lg_message_kind {
#define LG_MESSAGE(name) LG_MESSAGE_##name,
#include "bus/messages.def"
#undef LG_MESSAGE
    LG_MESSAGE_KINDS
} lg_message_kind;
const char *lg_message_name(lg_message_kind k); /* "hello" */

struct lg_message {
    lg_message_kind kind;
    lg_role role; /* of the sender; LG_ROLE_lgsup for the command line */
    int index;
    lg_incarnation incarnation;
    int level;                          /* event: lg_log_level; error: -lg_err */
    char text[LG_MESSAGE_TEXT_MAX + 1]; /* cut at the limit when packed */
};

/* Returns the number of bytes written. */
size_t lg_message_pack(const struct lg_message *m, unsigned char ret[LG_MESSAGE_BYTES]);
/* LG_ERR_CORRUPT, without a trace (a stranger's bytes are no failure of ours), *ret untouched. */
int lg_message_unpack(const void *data, size_t bytes, struct lg_message *ret);
