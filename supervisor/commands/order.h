/* `lgsup scale` and `lgsup swap` as the command line sees them: check the words, send the order to the
 * lgsup in charge, wait until it is carried out. Of several hosts all carry it out, or the one that was named, and each
 * answers for itself. */
#pragma once
#include "base/check.h"

struct lg_order_to {
    const char *dir;
    const char *host; /* of --host; NULL: all */
};
/* role: "vae"; n: "4". Prints what runs now. */
int lg_order_scale(const struct lg_order_to *to, const char *role, const char *n);
/* what: "ckpt", "vae" or "vae.1"; program: path of the new program, NULL: the one in force again. */
int lg_order_swap(const struct lg_order_to *to, const char *what, const char *program);
/* `lgsup hosts --take`. */
int lg_order_take(const char *dir);
