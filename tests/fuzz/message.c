/* Fuzz target: a message as a peer may send it. What is accepted packs and unpacks to the same. */
#include "bus/message.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

LG_FUZZ_TARGET(message)
{
    struct lg_message m, again;
    unsigned char packed[LG_MESSAGE_BYTES];
    if (lg_message_unpack(data, bytes, &m) < 0) return;
    LG_ASSERT(strlen(m.text) <= LG_MESSAGE_TEXT_MAX && lg_message_name(m.kind)[0] != '?');
    LG_ASSERT(m.role >= 0 && m.role < LG_ROLE_COUNT && m.index >= 0 && m.level >= 0);
    size_t n = lg_message_pack(&m, packed);
    LG_ASSERT(lg_message_unpack(packed, n, &again) == 0);
    LG_ASSERT(again.kind == m.kind && again.role == m.role && again.index == m.index);
    LG_ASSERT(again.incarnation == m.incarnation && again.level == m.level);
    LG_ASSERT(strcmp(again.text, m.text) == 0);
}
