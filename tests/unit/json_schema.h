/* Checks JSON against the part of JSON Schema that our schemas use: type, enum, minimum, properties,
 * required, additionalProperties, items, anyOf, "$ref": "#" (the whole schema again), and true and false
 * as schemas. Any other keyword (besides texts) is refused, so that a schema cannot say what nobody checks. */
#pragma once
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

/* False: ret_why says where and what. */
bool json_schema_holds(const cJSON *schema, const cJSON *value, char *ret_why, size_t bytes);
