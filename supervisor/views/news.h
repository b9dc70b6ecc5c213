/* What a view has to say to the user: collected where it is noticed, said by the loop. */
#pragma once
#include "base/log.h"

enum { LG_NEWS_MAX = 8, LG_NEWS_BYTES = 600 };

struct lg_news {
    int n; /* more than LG_NEWS_MAX of one look are lost */
    struct {
        lg_log_level level;
        char text[LG_NEWS_BYTES];
    } item[LG_NEWS_MAX];
};

void lg_news_add(struct lg_news *news, lg_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
