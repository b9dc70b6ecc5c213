/* Epochs as files; see shared.h. */
#include "supervisor/hosts/shared.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_BYTES_MAX = 16384, NUMBER_BYTES = 20 };

static int write_text(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot create %s: %s", path, strerror(errno));
    int rc = lg_write_all(fd, text, strlen(text));
    if (rc == 0 && fsync(fd) < 0) rc = LG_FAIL(LG_ERR_IO, "fsync of %s: %s", path, strerror(errno));
    close(fd);
    LG_TRY(rc);
    return 0;
}

static int write_epoch(const char *path, const struct lg_epoch *e)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an epoch's file");
    fprintf(f, "formation %" PRIu64 "\nnumber %" PRIu64 "\nfirst_step %" PRIu64 "\nleader %d\n",
            e->formation, e->number, e->first_step, e->leader);
    for (int h = 0; h < LG_HOSTS_MAX; h++)
        if (e->members >> h & 1)
            fprintf(f, "host %d place %u life %" PRIu64 "\n", h, e->place[h], e->life[h]);
    fputs("end\n", f);
    const int rc = fclose(f) == 0 ? write_text(path, text)
                                  : LG_FAIL(LG_ERR_NOSPACE, "no memory for an epoch's file");
    free(text);
    LG_TRY(rc);
    return 0;
}

static bool parse(const char *text, struct lg_epoch *ret)
{
    struct lg_epoch e = {0};
    int used = 0, h;
    unsigned place;
    uint64_t life;
    if (sscanf(text, "formation %" SCNu64 " number %" SCNu64 " first_step %" SCNu64 " leader %d%n",
               &e.formation, &e.number, &e.first_step, &e.leader, &used) != 4)
        return false;
    for (text += used;
         sscanf(text, " host %d place %u life %" SCNu64 "%n", &h, &place, &life, &used) == 3;
         text += used) {
        if (h < 0 || h >= LG_HOSTS_MAX || place >= LG_PLACES_MAX) return false;
        e.members |= UINT64_C(1) << h;
        e.place[h] = (uint8_t)place;
        e.life[h] = life;
    }
    *ret = e;
    return !strcmp(text, "\nend\n") && e.leader >= 0 && e.leader < LG_HOSTS_MAX &&
           (e.members >> e.leader & 1);
}

static int read_epoch(const char *path, const struct lg_epoch *expected, struct lg_epoch *ret)
{
    char *text = NULL;
    size_t bytes;
    LG_TRY(lg_read_file(path, FILE_BYTES_MAX, &text, &bytes));
    const bool good = parse(text, ret) && ret->formation == expected->formation &&
                      ret->number == expected->number;
    free(text);
    if (!good) return LG_FAIL(LG_ERR_CORRUPT, "%s is no epoch's file", path);
    return 0;
}

/* An answer of link() may be lost on its way from a server; the number of names tells what came of it. */
static int link_once(const char *from, const char *to)
{
    struct stat st;
    if (link(from, to) == 0 || errno == EEXIST) return 0;
    const int e = errno;
    if (stat(from, &st) == 0 && st.st_nlink == 2) return 0;
    return LG_FAIL(lg_err_from_errno(e), "link(%s, %s): %s", from, to, strerror(e));
}

static int path_of(char dir[LG_PATH_BYTES], const char *folder, uint64_t lineage)
{
    LG_TRY(lg_path(dir, "%s/epochs/%016" PRIx64, folder, lineage));
    return 0;
}

static int make_number(const char *dir, const char *path)
{
    char own[LG_PATH_BYTES], text[NUMBER_BYTES];
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        return LG_FAIL(LG_ERR_IO, "getrandom fails");
    number |= 1;
    LG_TRY(lg_path(own, "%s/.folder.%016" PRIx64, dir, number));
    snprintf(text, sizeof text, "%016" PRIx64 "\n", number);
    int rc = write_text(own, text);
    if (rc == 0) rc = link_once(own, path);
    unlink(own);
    LG_TRY(rc);
    LG_TRY(lg_fsync_dir(dir));
    return 0;
}

int lg_shared_number(const char *folder, uint64_t lineage, bool make, uint64_t *ret)
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES], *text = NULL, end = 0;
    size_t bytes;
    LG_TRY(path_of(dir, folder, lineage));
    LG_TRY(lg_path(path, "%s/folder", dir));
    if (make) LG_TRY(lg_mkdirs(dir));
    if (make && !lg_path_exists(path)) LG_TRY(make_number(dir, path));
    LG_TRY(lg_read_file(path, FILE_BYTES_MAX, &text, &bytes));
    const bool good = sscanf(text, "%" SCNx64 "%c", ret, &end) == 2 && end == '\n' && *ret;
    free(text);
    if (!good) return LG_FAIL(LG_ERR_CORRUPT, "%s is no folder's number", path);
    return 0;
}

int lg_shared_link(const struct lg_shared_place *at, const struct lg_epoch *e, struct lg_epoch *ret)
{
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES], own[LG_PATH_BYTES];
    uint64_t number;
    LG_TRY(path_of(dir, at->folder, at->lineage));
    LG_TRY(lg_path(path, "%s/%" PRIu64 ".%" PRIu64, dir, e->formation, e->number));
    LG_TRY(lg_path(own, "%s/.%" PRIu64 ".%d.%" PRIu64, dir, e->life[e->leader], (int)getpid(),
                   e->number));
    const int known = lg_shared_number(at->folder, at->lineage, false, &number);
    if (known == LG_ERR_NOTFOUND || (known == 0 && at->number && number != at->number))
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s is not the folder that this run began with: is it mounted?", at->folder);
    LG_TRY(known);
    if (!lg_path_exists(path)) {
        int rc = write_epoch(own, e);
        if (rc == 0) rc = link_once(own, path);
        unlink(own);
        LG_TRY(rc);
        LG_TRY(lg_fsync_dir(dir));
    }
    LG_TRY(read_epoch(path, e, ret));
    return 0;
}
