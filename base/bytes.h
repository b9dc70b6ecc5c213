/* Numbers of bytes for people. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* "1.5 GiB" */
const char *lg_bytes_text(uint64_t bytes, char ret[32]);
/* "512MiB", "1.5GB", "4096": at least one byte; false: it is no such text. */
bool lg_bytes_parse(const char *text, size_t *ret);
