/* The key of a cluster: one CURVE pair, which all hosts of a run have a copy of and nobody else. Who can prove that he
 * has the secret half is a host; nothing else is heard. The file, two lines, mode 0600:
 *
 *   public = "40 characters of Z85 (ZeroMQ RFC 32)"
 *   secret = "..."
 */
#pragma once
#include "base/check.h"

enum { LG_KEY_TEXT = 41 };
struct lg_cluster_key {
    char public_[LG_KEY_TEXT], secret[LG_KEY_TEXT];
};

/* Makes a new one. LG_ERR_BUSY: there is a file of that name already. */
int lg_cluster_key_make(const char *path);
/* LG_ERR_CONFIG: others than its owner may read it, or it is not such a file. */
int lg_cluster_key_load(const char *path, struct lg_cluster_key *ret);
