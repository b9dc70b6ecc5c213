/* Numbers of bytes for people. */
#pragma once
#include <stdint.h>

/* "1.5 GiB" */
const char *lg_bytes_text(uint64_t bytes, char ret[32]);
