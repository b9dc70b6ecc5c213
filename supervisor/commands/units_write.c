/* `lgsup units`: fills the templates of systemd/; see units_write.h.
 *
 * The texts are part of the program (.incbin), so that an lgsup that was copied somewhere can write
 * units of its own version. */
#include "supervisor/commands/units_write.h"
#include "base/fs.h"
#include "base/log.h"
#include "config/plan.h"
#include "shm/keeper.h"
#include "supervisor/run/child.h"
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEMPLATE(name, file)                                                                       \
    __asm__(".section .rodata\n.global lg_template_" #name "\nlg_template_" #name                  \
            ":\n.incbin \"" file "\"\n.byte 0\n.previous\n");                                      \
    extern const char lg_template_##name[]

TEMPLATE(supervisor, "systemd/lgsup.service.in");
TEMPLATE(end, "systemd/lg-end.service.in");
TEMPLATE(keeper, "systemd/lg-keeper.service.in");
TEMPLATE(role, "systemd/lg-role@.service.in");
TEMPLATE(slice, "systemd/lg.slice.in");
TEMPLATE(common, "systemd/common.in");

enum {
    PREFIX_CHARS_MAX = 32,
    QUOTED_BYTES = 2 * LG_PATH_BYTES + 8,
    SETS_BYTES = 1 << 16,
    KEY_BYTES = 32,
    VALUES_MAX = 20
};

bool lg_units_is_prefix(const char *prefix)
{
    size_t n = strlen(prefix);
    return n >= 1 && n <= PREFIX_CHARS_MAX && prefix[0] >= 'a' && prefix[0] <= 'z' &&
           strspn(prefix, "abcdefghijklmnopqrstuvwxyz0123456789_") == n;
}

int lg_units_quote(const char *word, bool command, char *ret, size_t bytes)
{
    size_t at = 0;
    ret[at++] = '"';
    for (const char *c = word; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 127)
            return LG_FAIL(LG_ERR_CONFIG,
                           "\"%s\" has a control character: it cannot stand in a "
                           "unit file",
                           word);
        if (*c == '%' || (*c == '$' && command))
            ret[at++] = *c;
        else if (*c == '"' || *c == '\\')
            ret[at++] = '\\';
        ret[at++] = *c;
        if (at + 4 > bytes)
            return LG_FAIL(LG_ERR_CONFIG, "\"%.80s...\" is too long for a unit file", word);
    }
    ret[at++] = '"';
    ret[at] = 0;
    return 0;
}

/* ---- filling ---- */

static const char *value_of(const char *key, size_t bytes, const struct lg_units_value *values,
                            int n)
{
    for (int i = 0; i < n; i++)
        if (strlen(values[i].key) == bytes && !memcmp(values[i].key, key, bytes))
            return values[i].text;
    return NULL;
}

/* An '@' that begins no key ("lg-vae@0.service") stays. */
int lg_units_fill(const char *text, const struct lg_units_value *values, int n, char **ret_text)
{
    char *out = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&out, &bytes);
    if (!f) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a unit file");
    while (*text) {
        size_t key = *text == '@' ? strspn(text + 1, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") : 0;
        if (!key || text[1 + key] != '@') {
            fputc(*text++, f);
            continue;
        }
        const char *value = value_of(text + 1, key, values, n);
        LG_ASSERT(value != NULL);
        fputs(value, f);
        text += key + 2;
    }
    if (lg_close_text(f) < 0) {
        free(out);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a unit file");
    }
    *ret_text = out;
    return 0;
}

/* ---- one pipeline ---- */

struct writer {
    const char *dir, *prefix;
    const lg_plan *plan;
    struct lg_units_value value[VALUES_MAX];
    int n_values;
};

static void add(struct writer *w, const char *key, const char *text)
{
    LG_ASSERT(w->n_values < VALUES_MAX);
    w->value[w->n_values++] = (struct lg_units_value){.key = key, .text = text};
}

static int write_unit(const struct writer *w, const char *template_text, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static int write_unit(const struct writer *w, const char *template_text, const char *fmt, ...)
{
    char name[128], path[LG_PATH_BYTES], *text;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    LG_TRY(lg_path(path, "%s/%s", w->dir, name));
    LG_TRY(lg_units_fill(template_text, w->value, w->n_values, &text));
    int rc = lg_publish_file(path, text, strlen(text));
    free(text);
    if (rc == 0 && chmod(path, 0644) < 0) /* systemd wants to show them to everybody */
        rc = LG_FAIL(LG_ERR_IO, "chmod %s: %s", path, strerror(errno));
    LG_TRY(rc);
    return 0;
}

/* When memory runs out, encoders go before ranks: what they lose is less. */
static const char *oom_score(lg_role r)
{
    return r == LG_ROLE_trainer || r == LG_ROLE_ckpt || r == LG_ROLE_ema ? "100" : "300";
}

static int write_roles(struct writer *w)
{
    for (int r = 0; r < LG_ROLE_keeper; r++) {
        if (w->plan->instances[r] == 0) continue;
        int before = w->n_values;
        add(w, "ROLE", lg_role_name((lg_role)r));
        add(w, "OOM", oom_score((lg_role)r));
        LG_TRY(
            write_unit(w, lg_template_role, "%s-%s@.service", w->prefix, lg_role_name((lg_role)r)));
        w->n_values = before;
    }
    return 0;
}

static char *role_units(const lg_plan *plan, const char *prefix)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return NULL;
    for (int r = 0, n = 0; r < LG_ROLE_keeper; r++)
        for (int k = 0; k < plan->instances[r]; k++)
            fprintf(f, "%s%s-%s@%d.service", n++ ? " " : "", prefix, lg_role_name((lg_role)r), k);
    if (lg_close_text(f) == 0) return text;
    free(text);
    return NULL;
}

static int quote_sets(const struct lg_units_args *args, char ret[SETS_BYTES])
{
    size_t at = 0;
    ret[0] = 0;
    for (int i = 0; i < args->n_set; i++) {
        char word[QUOTED_BYTES];
        LG_TRY(lg_units_quote(args->set[i], true, word, sizeof word));
        int n = snprintf(ret + at, SETS_BYTES - at, " --set %s", word);
        if (n < 0 || (size_t)n >= SETS_BYTES - at)
            return LG_FAIL(LG_ERR_CONFIG, "more --set than fit a unit file");
        at += (size_t)n;
    }
    return 0;
}

struct texts {
    char lgsup[QUOTED_BYTES], keeper[QUOTED_BYTES], file[QUOTED_BYTES], run[QUOTED_BYTES];
    char run_path[QUOTED_BYTES], cache_path[QUOTED_BYTES], job[QUOTED_BYTES], sets[SETS_BYTES];
    char cwd[QUOTED_BYTES], runtime[64], regions[16];
    char *roles, *common;
};

static int quote_program(const char *name, char ret[QUOTED_BYTES])
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_program_path(name, path));
    LG_TRY(lg_units_quote(path, true, ret, QUOTED_BYTES));
    return 0;
}

/* The cache is made now: a unit can only open up what is there. */
static int quote_cache(const struct passwd *user, char ret[QUOTED_BYTES])
{
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s/.cache/lg", user->pw_dir));
    if (lg_mkdirs(path) < 0) lg_err_clear(); /* algorithms are chosen anew at each start then */
    LG_TRY(lg_units_quote(path, false, ret, QUOTED_BYTES));
    return 0;
}

/* Paths in --set are relative to it. WorkingDirectory= knows no quotes. */
static int plain_cwd(char ret[QUOTED_BYTES])
{
    char path[LG_PATH_BYTES], quoted[QUOTED_BYTES];
    if (!getcwd(path, sizeof path))
        return LG_FAIL(lg_err_from_errno(errno), "the working directory: %s", strerror(errno));
    if (strpbrk(path, "\"\\"))
        return LG_FAIL(LG_ERR_CONFIG,
                       "call it in another directory: %s cannot stand in a unit file", path);
    LG_TRY(lg_units_quote(path, false, quoted, sizeof quoted));
    snprintf(ret, QUOTED_BYTES, "%.*s", (int)strlen(quoted) - 2, quoted + 1);
    return 0;
}

/* Same instances, same texts. t and `absolute` outlive w. */
static int prepare(struct writer *w, struct texts *t, const struct lg_units_args *args,
                   const lg_config *c)
{
    char absolute[LG_PATH_BYTES];
    const struct passwd *user = getpwuid(geteuid());
    if (!user) return LG_FAIL(LG_ERR_FAILED, "user %u has no name", (unsigned)geteuid());
    if (!realpath(args->file, absolute))
        return LG_FAIL(lg_err_from_errno(errno), "%s: %s", args->file, strerror(errno));
    LG_TRY(quote_program("lgsup", t->lgsup));
    LG_TRY(plain_cwd(t->cwd));
    LG_TRY(quote_program(lg_role_program(LG_ROLE_keeper), t->keeper));
    LG_TRY(quote_cache(user, t->cache_path));
    LG_TRY(quote_sets(args, t->sets));
    LG_TRY(lg_units_quote(absolute, true, t->file, sizeof t->file));
    LG_TRY(lg_units_quote(c->job_dir, true, t->run, sizeof t->run));
    LG_TRY(lg_units_quote(c->job_dir, false, t->run_path, sizeof t->run_path));
    LG_TRY(lg_units_quote(c->job_name, false, t->job, sizeof t->job));
    LG_TRY(lg_mkdirs(c->job_dir)); /* a unit can only open up what is there */
    snprintf(t->runtime, sizeof t->runtime, "/run/%s", w->prefix);
    snprintf(t->regions, sizeof t->regions, "%d", LG_KEEPER_REGIONS_MAX);
    t->roles = role_units(w->plan, w->prefix);
    if (!t->roles) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a unit file");
    add(w, "PREFIX", w->prefix);
    add(w, "JOB", t->job);
    add(w, "USER", user->pw_name);
    add(w, "LGSUP", t->lgsup);
    add(w, "KEEPER", t->keeper);
    add(w, "FILE", t->file);
    add(w, "SETS", t->sets);
    add(w, "RUN_DIR", t->run);
    add(w, "RUN_PATH", t->run_path);
    add(w, "CACHE_PATH", t->cache_path);
    add(w, "RUNTIME", t->runtime);
    add(w, "CWD", t->cwd);
    add(w, "REGIONS_MAX", t->regions);
    add(w, "ROLE_UNITS", t->roles);
    LG_TRY(lg_units_fill(lg_template_common, w->value, w->n_values, &t->common));
    add(w, "COMMON", t->common);
    return 0;
}

static int write_all(struct writer *w)
{
    LG_TRY(lg_mkdirs(w->dir));
    LG_TRY(write_unit(w, lg_template_supervisor, "%ssup.service", w->prefix));
    LG_TRY(write_unit(w, lg_template_end, "%s-end.service", w->prefix));
    LG_TRY(write_unit(w, lg_template_keeper, "%s-keeper.service", w->prefix));
    LG_TRY(write_unit(w, lg_template_slice, "%s.slice", w->prefix));
    LG_TRY(write_roles(w));
    return 0;
}

static void say_what_next(const struct writer *w)
{
    printf("%s: units of user %s\n", w->dir, value_of("USER", 4, w->value, w->n_values));
    printf("  cp '%s'/%s* /etc/systemd/system/ && systemctl daemon-reload\n", w->dir, w->prefix);
    printf("  systemctl start %ssup      # restart: training goes on; stop: checkpoint and end\n",
           w->prefix);
    printf("  systemctl enable %ssup     # at every boot\n", w->prefix);
}

static int write_for(const struct lg_units_args *args, const lg_config *c)
{
    char dir[LG_PATH_BYTES];
    lg_plan plan;
    LG_TRY(lg_plan_make(c, NULL, &plan));
    LG_TRY(lg_path(dir, "%s%s", args->dir ? args->dir : c->job_dir, args->dir ? "" : "/units"));
    struct texts *t = calloc(1, sizeof *t);
    if (!t) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the unit files");
    struct writer w = {.dir = dir, .prefix = args->prefix ? args->prefix : "lg", .plan = &plan};
    int rc = prepare(&w, t, args, c);
    if (rc == 0) rc = write_all(&w);
    if (rc == 0) say_what_next(&w);
    free(t->roles);
    free(t->common);
    free(t);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

int lg_units_write(const struct lg_units_args *args)
{
    lg_config *config = NULL;
    int rc;
    if (args->prefix && !lg_units_is_prefix(args->prefix))
        return LG_FAIL(LG_ERR_USAGE,
                       "--prefix needs 1 to %d of a-z, 0-9 and _, beginning with a letter: %s",
                       PREFIX_CHARS_MAX, args->prefix);
    LG_TRY(lg_config_load(args->file, args->set, args->n_set, &config));
    LG_TRY_GOTO(rc, lg_config_check(config), out);
    if (config->hosts_count > 1)
        LG_TRY_GOTO(rc,
                    LG_FAIL(LG_ERR_CONFIG,
                            "hosts.count = %d: these units are for a run of one host; for "
                            "several examples/hosts has one unit for each machine, examples/slurm "
                            "a job",
                            (int)config->hosts_count),
                    out);
    LG_TRY_GOTO(rc, write_for(args, config), out);
out:
    lg_config_free(&config);
    return rc;
}
