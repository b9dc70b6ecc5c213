/* The board's first bytes. They mean the same in every version of this program, for ever: whatever else
 * has changed, a later or an earlier build can tell from them whether processes of a run may live, and
 * name the difference. So nothing here is ever moved, removed or given another meaning; a field may be
 * added at the end, where builds of before have something else (a reader must be able to tell).
 *
 * Writer: lgsup, before any process of the run starts; made durable then, so that a loss of power
 * leaves either no board or one whose preamble can be read. `ended` alone is stored later. */
#pragma once
#include "shm/layout.h"

#define LG_BOARD_MAGIC UINT64_C(0x6472616f626c6c67) /* "gllboard" */
/* No number of a step, which boards of layout version 2 and before have in its place. */
#define LG_BOARD_ENDED UINT64_C(0xe0dede0dede0dede)

struct lg_board_preamble {
    uint64_t magic;       /* LG_BOARD_MAGIC; stored last of all */
    uint64_t version;     /* LG_LAYOUT_VERSION */
    uint64_t layout_hash; /* lg_layout_hash() */
    uint64_t bytes;       /* of the file */
    uint64_t plan_hash;
    uint64_t run_id;  /* random, new at each start that is not an adoption */
    char boot_id[40]; /* /proc/sys/kernel/random/boot_id, with a NUL */
    /* LG_BOARD_ENDED: no process of the run lives and its memory is gone. Writer: lgsup, as its last
     * store; readers: whoever finds a board of another build. Dying before it: such a board counts as
     * one whose processes may live, until `lgsup stop --kill` has looked. */
    _Atomic(uint64_t) ended;
    uint64_t inode; /* of the file: another one's content is a copy of the board of another run */
};
/* For ever. */
static_assert(offsetof(struct lg_board_preamble, magic) == 0, "");
static_assert(offsetof(struct lg_board_preamble, version) == 8, "");
static_assert(offsetof(struct lg_board_preamble, layout_hash) == 16, "");
static_assert(offsetof(struct lg_board_preamble, bytes) == 24, "");
static_assert(offsetof(struct lg_board_preamble, plan_hash) == 32, "");
static_assert(offsetof(struct lg_board_preamble, run_id) == 40, "");
static_assert(offsetof(struct lg_board_preamble, boot_id) == 48, "");
static_assert(offsetof(struct lg_board_preamble, ended) == 88, "");
static_assert(offsetof(struct lg_board_preamble, inode) == 96, "");
static_assert(sizeof(struct lg_board_preamble) == 104, "");

/* What a board file is to this program. */
typedef enum lg_board_standing {
    LG_BOARD_MISSING,     /* there is no such file: nothing lives */
    LG_BOARD_OTHER_BOOT,  /* from before the machine's last start, or of another machine */
    LG_BOARD_OTHER_BUILD, /* of this boot, with another layout: its processes may live */
    LG_BOARD_OVER,        /* the same, but its run has ended: nothing lives */
    LG_BOARD_COPY, /* a copy of the board of another run directory, whose processes may live */
    LG_BOARD_UNREADABLE, /* cannot be read, or is no board: processes may live */
    LG_BOARD_FITS,       /* lg_board_open maps it */
} lg_board_standing;

/* Reads the preamble of the file (never through a mapping, so a file that is too short harms nobody)
 * and compares it with this program and this boot. *ret is valid with OTHER_BOOT, OTHER_BUILD, OVER,
 * COPY and FITS. Unless it fits, a message says what differs: lg_err_message(), code LG_ERR_NOTFOUND,
 * LG_ERR_MISMATCH, LG_ERR_CORRUPT or LG_ERR_IO. */
lg_board_standing lg_board_look(const char *path, struct lg_board_preamble *ret, int *ret_code);
/* The same of a file that is open. */
lg_board_standing lg_board_look_fd(const char *path, int fd, struct lg_board_preamble *ret,
                                   int *ret_code);

/* This boot's id; LG_ERR_IO. */
int lg_boot_id(char ret[40]);

/* Every process that has joined a board holds a lock on the file (shared, of its open file) for as long
 * as it lives. That the lock is free proves nothing: file systems without locks exist, and builds that
 * took none. That it is held means that somebody lives, perhaps where no pid reaches: in another
 * container, or on another machine that mounts the directory. */
void lg_board_hold(int fd);
bool lg_board_is_held(const char *path);
