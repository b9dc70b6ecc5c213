/* A text that is published as a file of a folder. */
#pragma once
#include <stddef.h>
#include <stdio.h>

struct lg_random_text {
    FILE *file; /* to be printed to */
    char *data;
    size_t bytes;
};

/* t stays where it is until it is published. */
void lg_random_text_begin(struct lg_random_text *t);
/* And nothing of it is left in memory. */
int lg_random_text_publish(struct lg_random_text *t, const char *dir, const char *name);
