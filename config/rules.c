/* Rules between keys, and the files a config names. Each rule is a few lines that know their keys,
 * their values and the way out; all are looked at, so that one `lgsup check` shows everything.
 *
 * The schema has already made every single value sane, so products here do not overflow.
 *
 * Here are the order of the rules, what their files share, and the files and folders of the job. */
#include "config/denoisers.h"
#include "config/rules_private.h"
#include "config/schema.h"
#include <string.h>
#include <sys/stat.h>

void lg_broken(struct lg_rules *r, const char *key, const char *fmt, ...)
{
    char where[LG_PROBLEM_BYTES / 2], text[LG_PROBLEM_BYTES];
    lg_key_where(r->c, key, where, sizeof where);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    lg_problem(&r->problems, "%s%s", where, text);
}

bool lg_rules_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool lg_rules_has_text(const lg_config *c)
{
    return lg_denoiser_info(lg_denoiser_kind_of(c->model_kind))->text;
}

const char *lg_rules_key_of(const struct lg_text_config *t, const char *key, char ret[48])
{
    snprintf(ret, 48, "%s.%s", t->section, key);
    return ret;
}

static bool has_file(const char *dir, const char *name)
{
    char path[LG_PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    return n < (int)sizeof path && lg_path_exists(path);
}

/* What stands between NAME and the end of the longest name of a file or folder (.tmp-NAME_step..., the number of
 * its writer behind it) has room in NAME_MAX; manifests and the status have room for it, too. */
enum { JOB_NAME_BYTES_MAX = 100 };
/* checkpoints/.tmp-NAME_stepN.WRITER/ema/diffusion_pytorch_model.safetensors has room behind it, also set aside. */
enum { JOB_DIR_BYTES_MAX = LG_PATH_BYTES - 3 * JOB_NAME_BYTES_MAX };

/* DIR/resume and the like are files of one line, as are the lines of a log. */
static bool has_control(const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7f) return true;
    return false;
}

/* "~" as a folder's name is a shell's home that no shell has seen. */
static bool has_tilde(const char *path)
{
    const char *at = strstr(path, "/~");
    return at && (at[2] == '/' || !at[2]);
}

static void check_job(struct lg_rules *r)
{
    const lg_config *c = r->c;
    if (!c->job_name[0] || c->job_name[0] == '.' || strchr(c->job_name, '/') ||
        has_control(c->job_name) || strlen(c->job_name) > JOB_NAME_BYTES_MAX)
        lg_broken(
            r, "job.name",
            "job.name = \"%.60s\" becomes part of file names: it must not be empty, begin with a "
            "dot, hold a slash or a control character, or be longer than %d bytes",
            c->job_name, JOB_NAME_BYTES_MAX);
    if (!c->job_dir[0]) lg_broken(r, "job.dir", "job.dir is empty: name the directory of the run");
    if (has_control(c->job_dir))
        lg_broken(r, "job.dir", "job.dir: %s has a control character in it: choose another",
                  c->job_dir);
    if (has_tilde(c->job_dir))
        lg_broken(r, "job.dir",
                  "job.dir: %s has a folder called ~, which is not made your home here: write the "
                  "whole path",
                  c->job_dir);
    if (strlen(c->job_dir) > JOB_DIR_BYTES_MAX)
        lg_broken(r, "job.dir",
                  "job.dir has %zu bytes: expected at most %d, since paths of %d bytes lie in it",
                  strlen(c->job_dir), JOB_DIR_BYTES_MAX, LG_PATH_BYTES);
}

static void check_files(struct lg_rules *r)
{
    const lg_config *c = r->c;
    lg_rules_data(r);
    check_job(r);
    if (lg_path_exists(c->job_dir) && !lg_rules_is_dir(c->job_dir))
        lg_broken(r, "job.dir", "job.dir: %s exists and is not a directory", c->job_dir);
    if (c->trainer_init_from[0] && !has_file(c->trainer_init_from, "config.json") &&
        !has_file(c->trainer_init_from, "model/config.json"))
        lg_broken(r, "trainer.init_from",
                  "trainer.init_from: %s %s: expected a checkpoint or a diffusers folder",
                  c->trainer_init_from,
                  lg_rules_is_dir(c->trainer_init_from) ? "has no config.json" : "does not exist");
    if (has_control(c->trainer_resume_from))
        lg_broken(r, "trainer.resume_from",
                  "trainer.resume_from: %s has a control character in it: rename what has it",
                  c->trainer_resume_from);
    else if (c->trainer_resume_from[0] && !has_file(c->trainer_resume_from, "manifest.json"))
        lg_broken(r, "trainer.resume_from",
                  "trainer.resume_from: %s %s: expected a checkpoint (weights alone: "
                  "trainer.init_from)",
                  c->trainer_resume_from,
                  lg_rules_is_dir(c->trainer_resume_from) ? "has no manifest.json"
                                                          : "does not exist");
}

int lg_config_check(const lg_config *c)
{
    struct lg_rules r = {.c = c};
    lg_rules_roles(&r);
    check_files(&r);
    lg_rules_model(&r);
    lg_rules_ranks(&r);
    lg_rules_window(&r);
    lg_rules_training(&r);
    return lg_problems_end(&r.problems, LG_ERR_CONFIG, c->file);
}
