/* Opening liblg-av.so; see av.h. */
#include "stages/io/av.h"
#include "base/fs.h"
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

/* Beside the program's folder, as backends are (kernels/device.c). */
static int find_file(char ret_path[LG_PATH_BYTES])
{
    static const char *const up[] = {"../lib", "../../lib"};
    char dir[LG_PATH_BYTES];
    LG_TRY(lg_program_dir(dir));
    for (size_t i = 0; i < LG_ARRAY_LEN(up); i++) {
        LG_TRY(lg_path(ret_path, "%s/%s/liblg-av.so", dir, up[i]));
        if (access(ret_path, R_OK) == 0) return 0;
    }
    return LG_FAIL(LG_ERR_NOTFOUND,
                   "films need liblg-av.so, which is not in %s/../lib: build it with make, where "
                   "libavformat-dev and libavcodec-dev are installed; a bundle has it with "
                   "BUNDLE_FILMS=1",
                   dir);
}

static int open_file(void **ret)
{
    char path[LG_PATH_BYTES];
    LG_TRY(find_file(path));
    *ret = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!*ret)
        return LG_FAIL(LG_ERR_NOTFOUND, "cannot load %s: %s: install libavformat and libavcodec",
                       path, dlerror());
    const char *const *interface = dlsym(*ret, "lg_av_interface");
    if (!interface || strcmp(*interface, LG_AV_INTERFACE) != 0)
        return LG_FAIL(LG_ERR_MISMATCH, "%s was built from other headers: build it again", path);
    return 0;
}

int lg_av_find(const char *symbol, const void **ret)
{
    static void *opened;
    if (!opened) LG_TRY(open_file(&opened));
    *ret = dlsym(opened, symbol);
    LG_ASSERT(*ret); /* the interface says that it is there */
    return 0;
}
