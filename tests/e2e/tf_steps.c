/* tf_steps scalars|pictures|histograms FILE...: the steps that stand in TensorBoard's event files, one a line, in
 * the order of the files. Fails at bytes that are no whole record. */
#include "base/fs.h"
#include "supervisor/views/tfevents.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int print_steps(const char *path, lg_tf_kind kind)
{
    char *data;
    size_t bytes, at = 0;
    struct lg_tf_record r;
    if (lg_read_file(path, 1 << 28, &data, &bytes) < 0) {
        fprintf(stderr, "%s\n", lg_err_message());
        return 1;
    }
    for (; lg_tf_read((const uint8_t *)data + at, bytes - at, &r); at += r.bytes)
        if (r.kind == kind) printf("%" PRIu64 "\n", r.step);
    free(data);
    if (at == bytes) return 0;
    fprintf(stderr, "%s: no whole record at byte %zu of %zu\n", path, at, bytes);
    return 1;
}

int main(int argc, char **argv)
{
    int bad = argc < 3;
    const char *what = argc > 1 ? argv[1] : "";
    lg_tf_kind kind = !strcmp(what, "pictures")     ? LG_TF_PICTURE
                      : !strcmp(what, "histograms") ? LG_TF_HISTOGRAMS
                                                    : LG_TF_SCALARS;
    for (int i = 2; i < argc; i++) bad |= print_steps(argv[i], kind);
    return bad;
}
