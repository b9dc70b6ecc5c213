/* Captions that stand in a folder's metadata.jsonl or metadata.csv, as the ImageFolder of Hugging Face's datasets has them:
 * for each picture a line {"file_name": "a/b.png", "text": "..."}, or a record of CSV (csv.h) with columns file_name and text, the
 * name relative to the folder that the file lies in. A folder and its subfolders may each have either or both. Part of source.h.
 *
 * A metadata.csv may have a column caption instead of text; with both, caption goes before where it is not empty. Other
 * columns say nothing here, whatever their names; these may not come twice. An empty field is no caption, quoted or not, as
 * datasets has it. Lists are for .jsonl alone. A metadata.csv without file_name, or without a column of captions, is about
 * something else: nothing of it is read, which the log says. */
#pragma once
#include "base/check.h"

#define LG_LINES_NAME      "metadata.jsonl"
#define LG_LINES_CSV_NAME  "metadata.csv"
#define LG_LINES_BYTES_MAX (1u << 30) /* of a file */
enum { LG_LINES_FILES_MAX = 1 << 15 };

struct lg_line {
    char *path;     /* of the picture, relative to the data set's folder */
    uint64_t at;    /* of the line in its file; of CSV, of the field with the caption */
    uint32_t bytes; /* of the line without its end, or of that field; 0: it has no caption */
    uint16_t file;  /* as given to lg_lines_add */
    bool is_csv;
    uint64_t number; /* 1, 2, ...: for messages; of CSV, the line that the record begins in */
};
struct lg_lines {
    struct lg_line *line; /* (count) */
    size_t count, capacity;
};

/* Is this path's last part metadata.jsonl or metadata.csv? */
bool lg_lines_is(const char *path);
/* Adds the lines of folder/relative. A line that is no JSON object, or no CSV, is LG_ERR_CONFIG; one without a file_name is
 * left out, which the log says once for a file. */
int lg_lines_add(struct lg_lines *x, const char *folder, const char *relative, uint16_t file);
/* After all were added: LG_ERR_CONFIG when two lines are of one picture. */
int lg_lines_sort(struct lg_lines *x);
/* The line of a picture, or NULL. */
const struct lg_line *lg_lines_find(const struct lg_lines *x, const char *path);
void lg_lines_free(struct lg_lines *x);
