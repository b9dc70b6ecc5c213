/* What the fuzz targets share; see fuzz.h.
 *
 * Files are memfds reached as /proc/self/fd/N: opening that name gives a descriptor of its own, a
 * regular file as far as fstat can tell, and no run touches a disk. */
#include "tests/fuzz/fuzz.h"
#include "base/fs.h"
#include "base/log.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char folder[LG_PATH_BYTES];
static pid_t folder_owner;

void lg_fuzz_quiet(void)
{
    lg_log_set_level(LG_ERROR);
}

static void put(int fd, const void *data, size_t bytes)
{
    LG_ASSERT(ftruncate(fd, 0) == 0 && lseek(fd, 0, SEEK_SET) == 0);
    LG_ASSERT(lg_write_all(fd, data, bytes) == 0);
}

const char *lg_fuzz_file(int slot, const void *data, size_t bytes)
{
    static int fds[LG_FUZZ_FILES];
    static char path[LG_FUZZ_FILES][32];
    LG_ASSERT(slot >= 0 && slot < LG_FUZZ_FILES);
    if (!fds[slot]) {
        fds[slot] = memfd_create("fuzz", MFD_CLOEXEC);
        LG_ASSERT(fds[slot] > 0);
        snprintf(path[slot], sizeof path[slot], "/proc/self/fd/%d", fds[slot]);
    }
    put(fds[slot], data, bytes);
    return path[slot];
}

static void remove_folder(void)
{
    if (getpid() == folder_owner) lg_remove_tree(folder);
}

const char *lg_fuzz_dir(void)
{
    if (folder[0]) return folder;
    const char *tmp = getenv("TMPDIR");
    LG_ASSERT(lg_path(folder, "%s/lg-fuzz.XXXXXX", tmp && tmp[0] ? tmp : "/tmp") == 0);
    LG_ASSERT(mkdtemp(folder));
    folder_owner = getpid();
    atexit(remove_folder);
    return folder;
}

const char *lg_fuzz_write(const char *name, const void *data, size_t bytes)
{
    static char path[LG_PATH_BYTES];
    LG_ASSERT(lg_path(path, "%s/%s", lg_fuzz_dir(), name) == 0);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    LG_ASSERT(fd >= 0);
    put(fd, data, bytes);
    close(fd);
    return path;
}

const char *lg_fuzz_link(const char *name, int slot)
{
    char path[LG_PATH_BYTES];
    LG_ASSERT(lg_path(path, "%s/%s", lg_fuzz_dir(), name) == 0);
    LG_ASSERT(symlink(lg_fuzz_file(slot, "", 0), path) == 0 || errno == EEXIST);
    return folder;
}

int lg_fuzz_fds(void)
{
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

unsigned lg_fuzz_u8(struct lg_fuzz_input *in)
{
    if (!in->bytes) return 0;
    in->bytes--;
    return *in->data++;
}

unsigned lg_fuzz_u16(struct lg_fuzz_input *in)
{
    unsigned low = lg_fuzz_u8(in);
    return low | lg_fuzz_u8(in) << 8;
}

char *lg_fuzz_take(struct lg_fuzz_input *in, size_t bytes_max, size_t *ret_bytes)
{
    size_t n = LG_MIN(bytes_max, in->bytes);
    char *copy = malloc(n + 1);
    LG_ASSERT(copy);
    if (n) memcpy(copy, in->data, n);
    copy[n] = 0;
    if (n) in->data += n;
    in->bytes -= n;
    *ret_bytes = n;
    return copy;
}

char *lg_fuzz_text(struct lg_fuzz_input *in)
{
    const uint8_t *end = in->bytes ? memchr(in->data, 0, in->bytes) : NULL;
    size_t n;
    char *text = lg_fuzz_take(in, end ? (size_t)(end - in->data) : in->bytes, &n);
    lg_fuzz_u8(in);
    return text;
}
