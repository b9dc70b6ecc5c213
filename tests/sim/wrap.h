/* For files that pretend calls: WRAP(type, name, parameters) { body } is what the program's `name` has
 * become by --wrap, REAL(type, name, parameters); declares __real_name, the call itself. Every name
 * stands in the .calls file beside it. */
#pragma once

#define REAL(type, name, ...) extern type __real_##name(__VA_ARGS__)
#define WRAP(type, name, ...)                                                                      \
    type __wrap_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__)
