/* A disk that loses power, in memory, for paths below /sim.
 *
 * The program is linked with --wrap for every call in disk.calls, so that the real code of base,
 * config and stages runs unchanged: what it writes below /sim lands here, everything else goes to
 * the system.
 *
 * What is kept at a power cut is what POSIX promises, no more:
 *   - a file's bytes as of its last fsync; of what was written later any 64 bytes may be kept or
 *     not, and the size may be any between;
 *   - a directory's names as of its last fsync; of every later creation, removal and rename each
 *     may be kept or not, in any order; a rename is one thing.
 * fsync of a file says nothing of its name, fsync of a directory nothing of what its files hold.
 *
 * A death (of a process, or of the machine) is a disk that refuses everything from one call on: the
 * code leaves by its error paths and frees its memory, and nothing that it does has an effect. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* X(name, what): what the disk breaks when told to; each must be noticed by the simulation. */
#define DISK_LIES_LIST(X)                                                                          \
    X(FILE_SYNC, "fsync of a file does nothing")                                                   \
    X(DIR_SYNC, "fsync of a directory does nothing")                                               \
    X(LEDGER_SYNC, "fsync of a file whose name starts with ledger does nothing")
enum disk_lie {
    DISK_HONEST,
#define X(name, what) DISK_##name,
    DISK_LIES_LIST(X)
#undef X
        DISK_LIES
};

/* Empties the disk: only /sim is there. */
void disk_format(uint64_t seed, enum disk_lie lie);
/* Calls that change something, since disk_format. */
uint64_t disk_changes(void);
/* From the change numbered `at` on (it may be half done) every call fails with EIO. 0: never. */
void disk_die_at(uint64_t at);
bool disk_is_dead(void);
/* One change in `every` fails with ENOSPC or EIO and has no effect, and more writes than that put a part
 * only. 0: none. */
void disk_refuse(uint64_t every);
/* The fate of what is not durable: chance (0 to 16, of 16) that a change is kept; < 0: drawn. */
void disk_power_loss(int chance);
/* The process is dead, the machine lives: what it wrote is there. */
void disk_revive(void);
/* Called before every change, never from within itself: another process that goes on meanwhile. */
void disk_meanwhile(void (*step)(void *), void *arg);
/* What if it happened now? The disk loses power with this fate (or, DISK_DEATH: the processes die, no
 * more), look() sees what is left and may change it; then everything is as it was, open files, what is
 * not durable and all. Also from within a step of disk_meanwhile. */
enum { DISK_DEATH = 17 };
void disk_what_if(int chance, void (*look)(void *), void *arg);
/* Of the names and contents that are seen at path; 0: nothing is there. */
uint64_t disk_hash(const char *path);
/* The tree with sizes, to stderr. */
void disk_show(void);
