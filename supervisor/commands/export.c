/* `lgsup export`; see export.h. Everything is put together in a folder beside the new one, which then takes its name. What
 * an interrupted export has left there is removed by the next one. */
#include "supervisor/commands/export.h"
#include "base/fs.h"
#include "base/printable.h"
#include "config/config.h"
#include "config/manifest.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEPTH_MAX = 8 };
static const char TRANSFORMER[] = "transformer";

static int copy_bytes(int from, int to, const char *path)
{
    char *piece = malloc(LG_PIECE_BYTES);
    if (!piece) return LG_FAIL(LG_ERR_NOSPACE, "no memory to copy %s", path);
    ssize_t n = 0;
    int rc = 0;
    while (rc == 0 && (n = read(from, piece, LG_PIECE_BYTES)) > 0)
        rc = lg_write_all(to, piece, (size_t)n);
    free(piece);
    LG_TRY(rc);
    if (n < 0) return LG_FAIL(LG_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    if (lg_fsync(to) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot write %s: %s", path, strerror(errno));
    return 0;
}

static int copy_file(const char *from, const char *to)
{
    int in;
    uint64_t bytes;
    LG_TRY(lg_open_file(from, &in, &bytes));
    int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int rc = out < 0
                 ? LG_FAIL(lg_err_from_errno(errno), "cannot create %s: %s", to, strerror(errno))
                 : copy_bytes(in, out, to);
    if (out >= 0) close(out);
    close(in);
    return rc;
}

/* A link where the file system can: what it leads to, since downloaded folders are full of symbolic ones. */
static int place_file(const char *from, const char *to)
{
    if (linkat(AT_FDCWD, from, AT_FDCWD, to, AT_SYMLINK_FOLLOW) == 0) return 0;
    return copy_file(from, to);
}

/* skip: a name in `from` that is left out, or NULL. */
static int place_tree(const char *from, const char *to, const char *skip, int depth)
{
    if (depth == DEPTH_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "%s: folders lie more than %d deep", from, DEPTH_MAX);
    LG_TRY(lg_mkdirs(to));
    DIR *d = opendir(from);
    if (!d) return LG_FAIL(lg_err_from_errno(errno), "cannot list %s: %s", from, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        char a[LG_PATH_BYTES], b[LG_PATH_BYTES];
        struct stat st;
        if (e->d_name[0] == '.' || (skip && !strcmp(e->d_name, skip))) continue;
        rc = lg_path(a, "%s/%s", from, e->d_name);
        if (rc == 0) rc = lg_path(b, "%s/%s", to, e->d_name);
        if (rc == 0 && stat(a, &st) < 0)
            rc = LG_FAIL(lg_err_from_errno(errno), "cannot read %s: %s", a, strerror(errno));
        if (rc == 0)
            rc = S_ISDIR(st.st_mode) ? place_tree(a, b, NULL, depth + 1) : place_file(a, b);
    }
    closedir(d);
    if (rc == 0) rc = lg_fsync_dir(to);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

/* The checkpoint that is meant, and the config of its run. */
static int find_checkpoint(const struct lg_export_args *args, char ret[LG_PATH_BYTES],
                           lg_config **ret_config, lg_manifest *m)
{
    char config[LG_PATH_BYTES], checkpoints[LG_PATH_BYTES];
    const bool is_checkpoint = lg_manifest_exists(args->from);
    LG_TRY(lg_path(ret, "%s", args->from));
    LG_TRY(lg_path(config, "%s%s/config.toml", args->from, is_checkpoint ? "/../.." : ""));
    if (!lg_path_exists(config))
        return LG_FAIL(LG_ERR_NOTFOUND,
                       "%s is neither a run directory nor a checkpoint of one (no %s)", args->from,
                       config);
    LG_TRY(lg_config_load(config, NULL, 0, ret_config));
    if (is_checkpoint) return lg_manifest_load(ret, m);
    LG_TRY(lg_path(checkpoints, "%s/checkpoints", args->from));
    return lg_manifest_newest(checkpoints, (*ret_config)->job_name, ret, m);
}

/* Beside the folder that is to be; *ret_parent is what it lies in. */
static int find_names(const struct lg_export_args *args, const char *pipeline,
                      char ret_tmp[LG_PATH_BYTES], char ret_parent[PATH_MAX])
{
    char out[LG_PATH_BYTES], of[PATH_MAX];
    LG_TRY(lg_path(out, "%s", args->out));
    for (size_t n = strlen(out); n > 1 && out[n - 1] == '/'; n--) out[n - 1] = 0;
    if (lg_path_exists(out))
        return LG_FAIL(LG_ERR_BUSY, "%s exists: name a folder that does not, or remove it", out);
    char *slash = strrchr(out, '/');
    const char *name = slash ? slash + 1 : out;
    char parent[LG_PATH_BYTES];
    LG_TRY(lg_path(parent, "%.*s", slash ? (int)(slash - out + (slash == out)) : 1,
                   slash ? out : "."));
    LG_TRY(lg_mkdirs(parent));
    if (!realpath(parent, ret_parent) || !realpath(pipeline, of))
        return LG_FAIL(lg_err_from_errno(errno), "cannot find %s or %s: %s", parent, pipeline,
                       strerror(errno));
    const size_t n = strlen(of);
    if (strncmp(ret_parent, of, n) == 0 && (!ret_parent[n] || ret_parent[n] == '/'))
        return LG_FAIL(LG_ERR_USAGE, "%s lies in %s, which is to be copied: name another folder",
                       args->out, pipeline);
    return lg_path(ret_tmp, "%s/.%s.exporting", ret_parent, name);
}

static int publish(const char *tmp, const char *out, const char *parent)
{
    if (rename(tmp, out) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot rename %s to %s: %s", tmp, out,
                       strerror(errno));
    return lg_fsync_dir(parent);
}

static int export(const struct lg_export_args *args, const char *pipeline, const char *checkpoint,
                  const lg_manifest *m)
{
    char index[LG_PATH_BYTES], weights[LG_PATH_BYTES], tmp[LG_PATH_BYTES], to[LG_PATH_BYTES];
    char parent[PATH_MAX];
    if (!pipeline[0])
        return LG_FAIL(LG_ERR_CONFIG,
                       "the run has no `pipeline`, whose other parts would be exported; %s/%s is a "
                       "transformer in diffusers layout as it is",
                       checkpoint, args->weights);
    LG_TRY(lg_path(index, "%s/model_index.json", pipeline));
    if (!lg_path_exists(index))
        return LG_FAIL(LG_ERR_NOTFOUND, "%s does not exist: the run's `pipeline` has moved", index);
    LG_TRY(find_names(args, pipeline, tmp, parent));
    LG_TRY(lg_manifest_verify(m, checkpoint));
    LG_TRY(lg_path(weights, "%s/%s", checkpoint, args->weights));
    LG_TRY(lg_path(to, "%s/%s", tmp, TRANSFORMER));
    LG_TRY(lg_remove_tree(tmp));
    int rc = place_tree(pipeline, tmp, TRANSFORMER, 0);
    if (rc == 0) rc = place_tree(weights, to, NULL, 1);
    if (rc == 0) rc = lg_fsync_dir(tmp);
    if (rc == 0) rc = publish(tmp, args->out, parent);
    if (rc < 0) lg_remove_tree(tmp);
    LG_TRY(rc);
    lg_print(stdout, "%s: %s of %s, the rest of %s\n", args->out, args->weights, checkpoint,
             pipeline);
    return 0;
}

int lg_export(const struct lg_export_args *args)
{
    char checkpoint[LG_PATH_BYTES];
    lg_config *c = NULL;
    lg_manifest *m = calloc(1, sizeof *m);
    if (!m) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a manifest");
    int rc = strcmp(args->weights, "ema") && strcmp(args->weights, "model")
                 ? LG_FAIL(LG_ERR_USAGE, "--weights %s: ema and model exist", args->weights)
                 : find_checkpoint(args, checkpoint, &c, m);
    if (rc == 0) rc = export(args, c->_pipeline, checkpoint, m);
    lg_config_free(&c);
    free(m);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
