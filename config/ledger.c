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

int lg_ledger_verify(const char *path, uint64_t first_step, uint64_t last_step, uint64_t batch)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    int rc = 0;
    for (uint64_t s = first_step; s < last_step && rc == 0; s++) {
        struct lg_ledger_record r = {0};
        ssize_t n = pread(fd, &r, sizeof r, (off_t)(s * sizeof r));
        if (n < 0)
            rc = LG_FAIL(LG_ERR_IO, "reading %s: %s", path, strerror(errno));
        else
            rc = verify_record(path, n == (ssize_t)sizeof r ? &r : &(struct lg_ledger_record){0}, s,
                               batch);
    }
    close(fd);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
