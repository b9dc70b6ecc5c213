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

static void check_files(struct lg_rules *r)
{
    const lg_config *c = r->c;
    lg_rules_data(r);
    if (!c->job_name[0] || c->job_name[0] == '.' || strchr(c->job_name, '/'))
        lg_broken(
            r, "job.name",
            "job.name = \"%.60s\" becomes part of file names: it must not be empty, begin with a "
            "dot or hold a slash",
            c->job_name);
    if (lg_path_exists(c->job_dir) && !lg_rules_is_dir(c->job_dir))
        lg_broken(r, "job.dir", "job.dir: %s exists and is not a directory", c->job_dir);
    if (c->trainer_init_from[0] && !has_file(c->trainer_init_from, "config.json") &&
        !has_file(c->trainer_init_from, "model/config.json"))
        lg_broken(r, "trainer.init_from",
                  "trainer.init_from: %s %s: expected a checkpoint or a diffusers folder",
                  c->trainer_init_from,
                  lg_rules_is_dir(c->trainer_init_from) ? "has no config.json" : "does not exist");
    if (c->trainer_resume_from[0] && !has_file(c->trainer_resume_from, "manifest.json"))
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
