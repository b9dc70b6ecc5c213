/* Small JSON documents as a tree of cJSON, after base/json.h has seen that they are JSON, no
 * deeper and no larger than allowed; strict but for Infinity and -Infinity, which diffusers writes into the
 * files of schedulers, and which become numbers. The one place that calls cJSON's parser on what is not ours. */
#pragma once
#include "base/check.h"
#include <cjson/cJSON.h>

/* tokens_max bounds names, values and brackets together; a value costs 64 bytes and its text. A name
 * that appears twice in one object is refused. Failures: LG_ERR_CORRUPT "label: ... (at byte N)",
 * LG_ERR_NOSPACE. The caller frees *ret with cJSON_Delete. */
int lg_json_tree(const char *label, const char *data, size_t bytes, size_t tokens_max, cJSON **ret);
/* A text of others into one that is to be printed. JSON is UTF-8, which a path or a text that was cut need not be: such a
 * text is made printable (base/printable.h), every other one stays as it is. */
void lg_json_add_text(cJSON *object, const char *name, const char *text);
/* A finite number that reads as itself. cJSON's own may be another in the last bit, where 15 digits are about as near. */
void lg_json_add_exact(cJSON *object, const char *name, double value);
