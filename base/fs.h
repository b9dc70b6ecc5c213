/* Files: whole reads, atomic publishing, directories. Paths are NUL-terminated UTF-8.
 *
 * Whatever takes long with a large file is done in pieces, each followed by a heartbeat
 * (base/heartbeat.h). */
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { LG_PATH_BYTES = 4096 };
/* Of a read or write between two heartbeats: at 100 KB/s, a disk in trouble, it takes 42 s. */
enum { LG_PIECE_BYTES = 4 << 20 };

/* Formats a path; LG_ERR_CONFIG when it does not fit LG_PATH_BYTES. */
int lg_path(char ret_path[LG_PATH_BYTES], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Bytes of the first part of a comma-separated list of paths; a comma within braces is no separator
 * (shards-{a,b}.tar). What follows is ',' or the end. */
size_t lg_path_list_part(const char *list);
/* mkdir -p with mode 0700 for what is created, whose names survive a power cut; also what another call has created that
 * was killed on the way. */
int lg_mkdirs(const char *path);
/* rm -r; a missing path is no error. Never follows links. */
int lg_remove_tree(const char *path);
bool lg_path_exists(const char *path);
/* Opens for reading, close-on-exec. What is no regular file is LG_ERR_IO, at once: a FIFO would wait for
 * ever for its writer, a device might never end. */
int lg_open_file(const char *path, int *ret_fd, uint64_t *ret_bytes);
/* Is it a directory of this user alone (owner, mode 0700, no link)? LG_ERR_NOTFOUND, LG_ERR_IO. */
int lg_check_private_dir(const char *path);
/* Whole file, NUL-terminated (the NUL is not counted). Larger than bytes_max: LG_ERR_CORRUPT.
 * The caller frees *ret_data. */
int lg_read_file(const char *path, size_t bytes_max, char **ret_data, size_t *ret_bytes);
/* Temporary beside path, write, fsync, rename, fsync of the directory. */
int lg_publish_file(const char *path, const void *data, size_t bytes);
/* Ends an open_memstream. -1: memory ran out on the way, and the text is not whole. */
int lg_close_text(FILE *text);
/* Files that a process of a run may have open: as many as the system lets this one (RLIMIT_NOFILE, the hard
 * limit). LG_ERR_IO when that is fewer than LG_OPEN_FILES_MIN, below which libraries abort. */
enum { LG_OPEN_FILES_MIN = 1024 };
int lg_raise_open_files(void);
int lg_write_all(int fd, const void *data, size_t bytes);
/* As fsync(), -1 with errno; the data before the rest and piece by piece, so that no single call takes as
 * long as the whole file. */
int lg_fsync(int fd);
int lg_fsync_dir(const char *path);
/* XXH3 64 of a whole file / of memory. */
int lg_hash_file(const char *path, uint64_t *ret_hash, uint64_t *ret_bytes);
uint64_t lg_hash(const void *data, size_t bytes);
/* Directory of the running program (".../build/bin"), without a slash at the end. */
int lg_program_dir(char ret_path[LG_PATH_BYTES]);
