/* Captions that stand in a folder's metadata.jsonl, as the ImageFolder of Hugging Face's datasets has them: for each
 * picture a line {"file_name": "a/b.png", "text": "..."}, the name relative to the folder that the metadata.jsonl lies in.
 * A folder may have several of them, one in each subfolder. Part of source.h. */
#pragma once
#include "base/check.h"

#define LG_LINES_NAME      "metadata.jsonl"
#define LG_LINES_BYTES_MAX (1u << 30) /* of a file */
enum { LG_LINES_FILES_MAX = 1 << 15 };

struct lg_line {
    char *path;      /* of the picture, relative to the data set's folder */
    uint64_t at;     /* of the line in its file */
    uint32_t bytes;  /* of the line, without its end */
    uint32_t file;   /* as given to lg_lines_add */
    uint64_t number; /* 1, 2, ...: for messages */
};
struct lg_lines {
    struct lg_line *line; /* (count) */
    size_t count, capacity;
};

/* Is this path's last part metadata.jsonl? */
bool lg_lines_is(const char *path);
/* Adds the lines of folder/relative. A line that is no JSON object is LG_ERR_CONFIG; one without a file_name is left out,
 * which the log says once for a file. */
int lg_lines_add(struct lg_lines *x, const char *folder, const char *relative, uint32_t file);
/* After all were added: LG_ERR_CONFIG when two lines are of one picture. */
int lg_lines_sort(struct lg_lines *x);
/* The line of a picture, or NULL. */
const struct lg_line *lg_lines_find(const struct lg_lines *x, const char *path);
void lg_lines_free(struct lg_lines *x);
