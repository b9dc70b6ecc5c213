/* `lgsup scale` and `lgsup swap` as the command line sees them: check the words, send the order to the
 * lgsup in charge, wait until it is carried out. */
#pragma once
#include "base/check.h"

/* role: "vae"; n: "4". Prints what runs now. */
int lg_order_scale(const char *dir, const char *role, const char *n);
/* what: "ckpt", "vae" or "vae.1"; program: path of the new program, NULL: the one in force again. */
int lg_order_swap(const char *dir, const char *what, const char *program);
/* `lgsup hosts --take`. */
int lg_order_take(const char *dir);
