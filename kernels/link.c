/* Links: the thin layer over a backend's functions. */
#include "kernels/link.h"
#include "base/check.h"
#include "kernels/backend.h"
#include <dlfcn.h>

static int find_calls(const lg_device *d, const struct lg_link_calls **ret)
{
    *ret = d->dl ? dlsym(d->dl, LG_BACKEND_LINKS) : NULL;
    if (*ret) return 0;
    return LG_FAIL(LG_ERR_NOTFOUND, "this device (%s) has no links to other machines", d->isa);
}

int lg_link_new_id(lg_device *d, struct lg_link_id *ret)
{
    const struct lg_link_calls *calls;
    LG_TRY(find_calls(d, &calls));
    LG_TRY(calls->new_id(d, ret));
    return 0;
}

int lg_link_open(lg_device *d, const struct lg_link_id *id, bool sends, lg_link **ret)
{
    const struct lg_link_calls *calls;
    LG_TRY(find_calls(d, &calls));
    LG_TRY(calls->open(d, id, sends, ret));
    (*ret)->device = d;
    (*ret)->calls = calls;
    return 0;
}

void lg_link_close(lg_link **l)
{
    if (*l) (*l)->calls->close(*l);
    *l = NULL;
}

void lg_link_give(lg_link *l, void *data, size_t bytes)
{
    LG_ASSERT(l->given - l->done < LG_LINK_DEPTH && bytes);
    l->place[l->given % LG_LINK_DEPTH] = (struct lg_link_place){data, bytes};
    l->given++;
}

int lg_link_progress(lg_link *l, uint64_t *ret_done)
{
    const int rc = l->calls->progress(l);
    *ret_done = l->done;
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
