/* The JSON of `lgsup status --json`, held against docs/status.schema.json. The program runs in the root of the sources. */
#pragma once
#include <cjson/cJSON.h>
#include <stdbool.h>

/* False: says on stderr where and what. */
bool status_follows_schema(const cJSON *status);
/* Fails the test unless the schema notices each field of this status, at any depth, that is missing, has another name
 * or is more than it describes. */
void status_schema_is_strict(cJSON *status);
/* Fails the test unless the schema's roles are those that a run can have. */
void status_schema_has_roles(void);
