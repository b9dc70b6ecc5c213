/* Which text a sample gets of its item's captions: one of them, or a line of them, its tags in another order.
 *
 * Captions are what a .txt or a .json gives (source.h), each maybe of several lines; a caption of tags is a list with commas,
 * "1girl, red hair, smile". Every choice is a function of (seed, n): Philox purposes CAPTION and TAGS. */
#pragma once
#include "base/check.h"
#include <stdint.h>

enum lg_caption_choice {
    LG_CAPTION_LISTED, /* one of them at random, whole */
    LG_CAPTION_FIRST,  /* the first of all lines that are not empty */
    LG_CAPTION_RANDOM, /* one of these lines at random */
};
/* data.caption */
enum lg_caption_choice lg_caption_choice_of(const char *text);

struct lg_caption_rule {
    enum lg_caption_choice choice;
    bool shuffle_tags;
    int64_t keep_tags; /* this many tags keep their places in front */
};

/* The lines of a text that are not empty, without white space at their ends: *text moves behind the line. NULL: there is no
 * more. */
const char *lg_caption_line(const char **text, size_t *ret_bytes);

/* Memory for a chosen text; zero it before the first use. */
typedef struct lg_caption {
    char *text;
    size_t capacity;
    struct lg_tag *tag;
    size_t tag_capacity;
} lg_caption;
/* The text of sample n: "" when there is none. Points into `caption` or into c, valid until either changes. Tags that are
 * shuffled come out without empty ones, with ", " between them. */
int lg_caption_choose(const struct lg_caption_rule *rule, uint64_t seed, uint64_t n,
                      const char *const *caption, int count, lg_caption *c, const char **ret);
void lg_caption_free(lg_caption *c);
