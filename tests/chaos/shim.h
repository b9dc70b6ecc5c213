/* What driver and shim share: a file, named by LG_CHAOS_CONTROL, mapped by every process of a run.
 *
 * A site is one place in the code of one of our programs that calls one of calls.def. The shim
 * enters each into the table when it is first reached. The driver arms one of them: the next process
 * that reaches it disarms it by compare-and-swap and its call fails, once.
 *
 *   site[i].key   shim, by compare-and-swap from 0; never changes again. Dying around it: nothing.
 *   site[i].hits  shim, counted
 *   site[i].fails shim, counted: how often the call was made to fail
 *   site[i].missed  driver: how often an armed site was not reached in time
 *   armed         driver stores index + 1; whoever fails the call stores 0 by compare-and-swap
 *   pass          driver, before armed: so many calls are let through first; shim counts down
 *   fired         shim: index + 1 of the last call that failed
 *   disk_full     driver: 1: writes to regular files fail
 *   slow_ms       driver: so long takes every fsync
 *   clock_s       driver: so far off is the clock of the day */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

enum { CHAOS_SITES_MAX = 4096, CHAOS_PROGRAMS = 8 };

enum chaos_call {
#define CALL(name, ...)         CHAOS_CALL_##name,
#define CALL_BY_HAND(name, ...) CHAOS_CALL_##name,
#include "tests/chaos/calls.def"
#undef CALL
#undef CALL_BY_HAND
    CHAOS_CALLS
};

/* key: 1 << 60 | program << 56 | call << 48 | offset of the return address in the program */
struct chaos_site {
    _Atomic(uint64_t) key;
    _Atomic(uint32_t) hits, fails, missed;
};
struct chaos_control {
    _Atomic(uint32_t) armed, pass, fired, fired_pid, disk_full, other_errno, slow_ms;
    _Atomic(int64_t) clock_s;
    uint64_t build; /* driver: hash of the programs that the sites belong to */
    struct chaos_site site[CHAOS_SITES_MAX];
};

static const char *const chaos_programs[CHAOS_PROGRAMS] = {
    "lg-loader", "lg-text", "lg-vae", "lg-trainer", "lg-ema", "lg-ckpt", "lg-keeper", "lgsup"};
