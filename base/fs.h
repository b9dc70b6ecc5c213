/* Files: whole reads, atomic publishing, directories. Paths are NUL-terminated UTF-8. */
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { LG_PATH_BYTES = 4096 };

/* Formats a path; LG_ERR_CONFIG when it does not fit LG_PATH_BYTES. */
int lg_path(char ret_path[LG_PATH_BYTES], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Bytes of the first part of a comma-separated list of paths; a comma within braces is no separator
 * (shards-{a,b}.tar). What follows is ',' or the end. */
size_t lg_path_list_part(const char *list);
/* mkdir -p with mode 0700 for what is created, whose names survive a power cut. */
int lg_mkdirs(const char *path);
/* rm -r; a missing path is no error. Never follows links. */
int lg_remove_tree(const char *path);
bool lg_path_exists(const char *path);
/* Whole file, NUL-terminated (the NUL is not counted). Larger than bytes_max: LG_ERR_CORRUPT.
 * The caller frees *ret_data. */
int lg_read_file(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes);
/* Temporary beside path, write, fsync, rename, fsync of the directory. */
int lg_publish_file(const char *path, const void *data, size_t bytes);
/* Ends an open_memstream. -1: memory ran out on the way, and the text is not whole. */
int lg_close_text(FILE *text);
int lg_write_all(int fd, const void *data, size_t bytes);
int lg_fsync_dir(const char *path);
/* XXH3 64 of a whole file / of memory. */
int lg_hash_file(const char *path, uint64_t *ret_hash, uint64_t *ret_bytes);
uint64_t lg_hash(const void *data, size_t bytes);
/* Directory of the running program (".../build/bin"), without a slash at the end. */
int lg_program_dir(char ret_path[LG_PATH_BYTES]);
