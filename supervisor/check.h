/* `lgsup check FILE`: is the config right, and what would run? Schema errors first, then rules, then
 * each role is asked for its bytes (`lg-<role> --plan`): lgsup itself computes nothing. */
#pragma once
#include "base/check.h"

int lg_check(const char *file, const char *const *set, int n_set);
