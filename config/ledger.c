/* The ledger's records; see ledger.h. */
#include "config/ledger.h"
#include "base/fs.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static uint64_t check_of(const struct lg_ledger_record *r)
{
    return lg_hash(r, offsetof(struct lg_ledger_record, check));
}

void lg_ledger_seal(struct lg_ledger_record *r)
{
    r->check = check_of(r);
}

/* *lineage: of the records so far. */
static int verify_lineage(const char *path, const struct lg_ledger_record *r, uint64_t *lineage)
{
    if (r->lineage == *lineage) return 0;
    if (!r->lineage || *lineage)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is of two runs: the record of step %" PRIu64 " is of lineage %016" PRIx64
                       ", expected %016" PRIx64,
                       path, r->step, r->lineage, *lineage);
    *lineage = r->lineage;
    return 0;
}

static int verify_record(const char *path, const struct lg_ledger_record *r, uint64_t step,
                         uint64_t batch)
{
    if (r->step == 0)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: no record of step %" PRIu64, path, step + 1);
    if (r->check != check_of(r))
        return LG_FAIL(LG_ERR_CORRUPT, "%s: the record of step %" PRIu64 " is damaged", path,
                       step + 1);
    if (r->step != step + 1 || r->first != step * batch || r->last != (step + 1) * batch - 1)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s: the record of step %" PRIu64 " says step %" PRIu64 ", samples %" PRIu64
                       " to %" PRIu64 "; expected %" PRIu64 " to %" PRIu64,
                       path, step + 1, r->step, r->first, r->last, step * batch,
                       (step + 1) * batch - 1);
    return 0;
}

/* A record that ends with the file reads as none. */
static int read_record(int fd, const char *path, uint64_t step, struct lg_ledger_record *ret)
{
    *ret = (struct lg_ledger_record){0};
    ssize_t n = pread(fd, ret, sizeof *ret, (off_t)(step * sizeof *ret));
    if (n < 0) return LG_FAIL(LG_ERR_IO, "reading %s: %s", path, strerror(errno));
    if (n < (ssize_t)sizeof *ret) *ret = (struct lg_ledger_record){0};
    return 0;
}

static int verify(int fd, const char *path, const struct lg_ledger_check *c)
{
    uint64_t lineage = 0;
    for (uint64_t s = c->first_step; s < c->last_step; s++) {
        struct lg_ledger_record r;
        LG_TRY(read_record(fd, path, s, &r));
        LG_TRY(verify_record(path, &r, s, c->batch));
        if (r.lineage && !lineage) lineage = c->lineage;
        LG_TRY(verify_lineage(path, &r, &lineage));
    }
    if (c->lineage && c->last_step > c->first_step && lineage != c->lineage)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is of another run: no record of it is of lineage %016" PRIx64, path,
                       c->lineage);
    return 0;
}

static int open_ledger(const char *path, int *ret)
{
    *ret = open(path, O_RDONLY | O_CLOEXEC);
    if (*ret < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    return 0;
}

int lg_ledger_verify(const char *path, const struct lg_ledger_check *c)
{
    int fd;
    LG_TRY(open_ledger(path, &fd));
    int rc = verify(fd, path, c);
    close(fd);
    LG_TRY(rc);
    return 0;
}

int lg_ledger_first(const char *path, uint64_t *ret)
{
    int fd;
    LG_TRY(open_ledger(path, &fd));
    struct lg_ledger_record r = {0};
    uint64_t step = 0;
    while (pread(fd, &r, sizeof r, (off_t)(step * sizeof r)) == (ssize_t)sizeof r && r.step == 0)
        step++;
    close(fd);
    *ret = step;
    return 0;
}
