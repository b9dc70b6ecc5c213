/* What layers.c and linear.c share. */
#pragma once
#include "stages/nets/layers.h"
#include <stdarg.h>
#include <stdio.h>

/* The text of a function's last named parameter, a format, and what follows it. */
#define LG_NET_FORMAT(text, fmt)                                                                   \
    do {                                                                                           \
        va_list ap;                                                                                \
        va_start(ap, fmt);                                                                         \
        int length = vsnprintf(text, sizeof(text), fmt, ap);                                       \
        va_end(ap);                                                                                \
        LG_ASSERT(length > 0 && (size_t)length < sizeof(text));                                    \
    } while (0)

/* A matrix (N, K), or what is no matrix. In 8 bits (storage.h) it is bytes of codes, and has a scale for each row. */
struct lg_matrix {
    lg_tensor w, scale; // (N, K), (N); scale LG_NONE: not in 8 bits
    lg_rows8 format;
};

/* Parameters of one kind of all parts of a layer, NAME<part><leaf>. */
struct lg_of_parts {
    const char *name, *leaf;
    const char *const *part;
    int n;
};

struct lg_of_parts lg_net_parts_of(const struct lg_layer *l, const char *name, const char *leaf);
/* They as one tensor of shape `all`, whose first dimension the parts share. */
struct lg_matrix lg_net_packed_param(lg_net *n, struct lg_of_parts of, struct lg_init init,
                                     lg_tensor all);
/* Nobody reads rows [from, to) of w, nor of its bias, if there is one. */
void lg_net_note_unread(lg_net *n, lg_tensor w, lg_tensor bias, int64_t from, int64_t to);

/* A shape: t's with another last dimension. */
lg_tensor lg_net_with_last(lg_tensor t, int64_t last);
