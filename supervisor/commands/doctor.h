/* `lgsup doctor`: does this machine have what a run needs? One line per question, and what to do
 * where the answer is no. */
#pragma once
#include "base/check.h"

/* *ret_exit: 0 when nothing that is needed is missing. */
int lg_doctor(int *ret_exit);
