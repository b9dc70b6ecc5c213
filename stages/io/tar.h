/* Tar archives: where the members lie, and writing shards.
 *
 * Reading makes one pass over the headers and reports each regular file with its offset and size,
 * so that later any member is one pread away; nothing is ever extracted. Formats: v7, ustar (with
 * prefix), pax (path, size; global headers), GNU (long names, base-256 sizes). Concatenated
 * archives are read through. Other types (folders, links, devices) are skipped. */
#pragma once
#include "base/check.h"

enum {
    LG_TAR_BLOCK = 512,
    LG_TAR_NAME_MAX = 4096,        /* longer names are LG_ERR_CORRUPT */
    LG_TAR_EXTENSION_MAX = 1 << 20 /* bytes of one pax or GNU extension header */
};

struct lg_tar_member {
    const char *name; /* valid during the call */
    uint64_t offset;  /* of the content, from the start of the archive */
    uint64_t size;
};
/* Called for each complete regular file in order; a negative return ends the scan with it. */
typedef int (*lg_tar_member_fn)(void *ctx, const struct lg_tar_member *m);

/* What remains when an archive ends too early. */
struct lg_tar_cut {
    uint64_t offset;            /* where the bytes are missing: the size of the file */
    char name[LG_TAR_NAME_MAX]; /* the member that is cut, "" when the cut is between members */
};

/* Scans the archive behind fd (pread only); path is for messages. An archive that ends within a
 * member or without its end mark is LG_ERR_CORRUPT, with the file and byte offset in the message;
 * every complete member before was reported and *ret_cut (may be NULL) is filled. With any other
 * failure ret_cut is untouched: a damaged header is LG_ERR_CORRUPT, a failing read LG_ERR_IO. */
int lg_tar_scan(int fd, const char *path, lg_tar_member_fn fn, void *ctx,
                struct lg_tar_cut *ret_cut);

/* Writing: equal calls give equal bytes (owner 0, time 0, mode 0644). The file appears under its
 * name, complete and fsynced, at finish. Names up to 100 bytes, or 255 if they split at a slash. */
typedef struct lg_tar_writer lg_tar_writer;
int lg_tar_writer_open(const char *path, lg_tar_writer **ret);
int lg_tar_writer_add(lg_tar_writer *w, const char *name, const void *data, size_t bytes);
/* End mark, fsync, rename, fsync of the folder. *w becomes NULL either way. */
int lg_tar_writer_finish(lg_tar_writer **w);
/* Drops the unfinished file. */
void lg_tar_writer_abort(lg_tar_writer **w);
