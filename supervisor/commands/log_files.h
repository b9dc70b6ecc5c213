/* The log files of a run directory, and what is new in them; see logs.h for who shows it. */
#pragma once
#include "base/fs.h"
#include "supervisor/hosts/answers.h"

enum { LG_LOG_FILES_MAX = 1024 };

struct lg_log_file {
    char name[LG_LOG_NAME_BYTES];
    char path[LG_PATH_BYTES];
    size_t shown; /* bytes from its beginning */
};

/* Adds the files in dir/logs that are not known yet, in the order of their names; role: NULL, or as on the command line. */
int lg_log_files_find(const char *dir, const char *role, struct lg_log_file *f, int *n);
/* What is new in a file, which counts as shown then: in whole lines when more may come. NULL: nothing. The caller
 * frees it. */
char *lg_log_file_read(struct lg_log_file *f, bool follow, size_t *ret_bytes);

/* For another host: what is in the files of dir behind the places that q names, LG_ANSWER_TEXT_MAX bytes at most, as
 * lg_log_pieces. Of a file that it does not name the newest 64 MiB. */
int lg_logs_answer(const char *dir, const struct lg_question *q, struct lg_reply *ret);
