/* `lgsup export`; see export.h. Everything is put together in a folder beside the new one, which then takes its name. What
 * an interrupted export has left there is removed by the next one. */
#include "supervisor/commands/export.h"
#include "base/fs.h"
#include "base/printable.h"
#include "config/config.h"
#include "config/denoisers.h"
#include "config/manifest.h"
#include "supervisor/run/child.h"
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

static bool is_adapter(const char *weights)
{
    char path[LG_PATH_BYTES];
    return lg_path(path, "%s/adapter_config.json", weights) == 0 && lg_path_exists(path);
}

/* option: for lg-merge, or NULL */
static int run_merge(const char *option, const char *weights, const char *to)
{
    char program[LG_PATH_BYTES], *argv[5] = {program}, *said = NULL;
    int code, n = 1;
    LG_TRY(lg_program_path("lg-merge", program));
    if (option) argv[n++] = (char *)option;
    argv[n++] = (char *)weights;
    argv[n++] = (char *)to;
    LG_TRY(lg_child_capture(program, argv, 1 << 16, &said, &code));
    int rc = code ? LG_FAIL(code < 64 ? -code : LG_ERR_FAILED, "%s", said) : 0;
    free(said);
    return rc;
}

/* An adapter with the net that it adapts, or a net as it is. */
static int place_net(const char *weights, const char *to)
{
    return is_adapter(weights) ? run_merge(NULL, weights, to) : place_tree(weights, to, NULL, 1);
}

/* The adapter alone, one file. */
static int export_kohya(const struct lg_export_args *args, const char *checkpoint,
                        const lg_manifest *m)
{
    char weights[LG_PATH_BYTES];
    if (strcmp(args->format, "kohya"))
        return LG_FAIL(LG_ERR_USAGE, "--format %s: kohya exists", args->format);
    if (args->merge)
        return LG_FAIL(LG_ERR_USAGE, "--format kohya is for an adapter alone: remove --merge");
    LG_TRY(lg_checkpoint_weights_dir(checkpoint, args->weights, weights));
    if (!is_adapter(weights))
        return LG_FAIL(LG_ERR_USAGE, "--format kohya: %s is a whole net, no adapter", weights);
    if (lg_path_exists(args->out))
        return LG_FAIL(LG_ERR_BUSY, "%s exists: name a file that does not, or remove it",
                       args->out);
    LG_TRY(lg_manifest_verify(m, checkpoint));
    LG_TRY(run_merge("--kohya", weights, args->out));
    lg_print(stdout, "%s: %s of %s in kohya's layout\n", args->out, args->weights, checkpoint);
    return 0;
}

/* What can be made of the weights. */
static int check_kind(const struct lg_export_args *args, const char *pipeline, const char *weights)
{
    char index[LG_PATH_BYTES];
    const bool adapter = is_adapter(weights);
    if (adapter && !args->merge)
        return LG_FAIL(LG_ERR_USAGE,
                       "%s is an adapter, which diffusers and peft read as it is; --merge exports "
                       "the model with it, --format kohya the adapter in that layout",
                       weights);
    if (!adapter && args->merge)
        return LG_FAIL(LG_ERR_USAGE, "--merge: %s is a whole net, no adapter", weights);
    if (!pipeline[0] && !adapter)
        return LG_FAIL(LG_ERR_CONFIG,
                       "the run has no `pipeline`, whose other parts would be exported; %s is a "
                       "net in diffusers layout as it is",
                       weights);
    if (!pipeline[0]) return 0;
    LG_TRY(lg_path(index, "%s/model_index.json", pipeline));
    if (!lg_path_exists(index))
        return LG_FAIL(LG_ERR_NOTFOUND, "%s does not exist: the run's `pipeline` has moved", index);
    return 0;
}

static int export(const struct lg_export_args *args, const lg_config *c, const char *checkpoint,
                  const lg_manifest *m)
{
    const char *pipeline = c->_pipeline,
               *part = lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->part;
    char weights[LG_PATH_BYTES], tmp[LG_PATH_BYTES], to[LG_PATH_BYTES], parent[PATH_MAX];
    const bool whole = pipeline[0];
    LG_TRY(lg_checkpoint_weights_dir(checkpoint, args->weights, weights));
    LG_TRY(check_kind(args, pipeline, weights));
    LG_TRY(find_names(args, whole ? pipeline : checkpoint, tmp, parent));
    LG_TRY(lg_manifest_verify(m, checkpoint));
    LG_TRY(lg_path(to, "%s%s%s", tmp, whole ? "/" : "", whole ? part : ""));
    LG_TRY(lg_remove_tree(tmp));
    int rc = whole ? place_tree(pipeline, tmp, part, 0) : 0;
    if (rc == 0) rc = place_net(weights, to);
    if (rc == 0) rc = lg_fsync_dir(tmp);
    if (rc == 0) rc = publish(tmp, args->out, parent);
    if (rc < 0) lg_remove_tree(tmp);
    LG_TRY(rc);
    if (whole)
        lg_print(stdout, "%s: %s of %s, the rest of %s\n", args->out, args->weights, checkpoint,
                 pipeline);
    else
        lg_print(stdout, "%s: %s of %s, a %s\n", args->out, args->weights, checkpoint, part);
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
    if (rc == 0)
        rc = args->format ? export_kohya(args, checkpoint, m) : export(args, c, checkpoint, m);
    lg_config_free(&c);
    free(m);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
