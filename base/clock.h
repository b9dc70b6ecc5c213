/* Time. Everything in ns, monotonic, except where the name says otherwise. */
#pragma once
#include <stdint.h>

int64_t lg_now_ns(void); /* CLOCK_MONOTONIC: comparable between processes of one boot */
int64_t lg_cpu_ns(void); /* CPU time of this process */
#define LG_MS_NS 1000000LL
#define LG_S_NS  1000000000LL
