/* What is written from a config: the effective config as TOML, the comparison at a resume, and the
 * reference page. All three walk over the schema's table in its order. */
#include "base/fs.h"
#include "config/config.h"
#include "config/problems.h"
#include "config/schema.h"
#include <stdlib.h>
#include <string.h>

static FILE *open_text(char **text, size_t *bytes)
{
    FILE *out = open_memstream(text, bytes);
    LG_ASSERT(out);
    return out;
}

char *lg_config_to_toml(const lg_config *c)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_text(&text, &bytes);
    const char *section = "";
    fputs("# The effective config: every key, paths absolute.\n", out);
    for (int i = 0; i < lg_key_count(); i++) {
        const lg_key *k = lg_key_at(i);
        if (lg_key_encoder(k) && !lg_key_applies(c, k)) continue; /* no such encoder */
        if (strcmp(k->section, section) != 0) fprintf(out, "\n[%s]\n", k->section);
        section = k->section;
        fprintf(out, "%s = ", k->key);
        lg_key_print(out, c, k);
        fputc('\n', out);
    }
    LG_ASSERT(lg_close_text(out) == 0);
    return text;
}

static char *value_text(const lg_config *c, const lg_key *k)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_text(&text, &bytes);
    lg_key_print(out, c, k);
    LG_ASSERT(lg_close_text(out) == 0);
    return text;
}

bool lg_config_may_change(const char *key)
{
    static const char *const may[] = {
        "trainer.ranks",  "trainer.threads",  "trainer.micro_batch_size", "parallel.zero",
        "parallel.sp",    "parallel.sp_kind", "memory.offload_optimizer", "trainer.optimizer",
        "trainer.groups", "memory.mlp_chunks"};
    for (size_t i = 0; i < LG_ARRAY_LEN(may); i++)
        if (!strcmp(may[i], key)) return true;
    return false;
}

static bool contains(const struct lg_strlist *l, const char *word)
{
    for (int i = 0; l && i < l->n; i++)
        if (!strcmp(l->v[i], word)) return true;
    return false;
}

bool lg_config_shares_checkpoints(const lg_config *c)
{
    return c->hosts_count > 1 && c->hosts_shared[0];
}

const char *lg_config_begins_with(const lg_config *c)
{
    return c->trainer_init_from[0] ? c->trainer_init_from : c->model_fresh ? "" : c->model_from;
}

struct lg_sides lg_config_latent_size(const lg_config *c)
{
    const struct lg_sides cells = c->data_latent_size, size = c->data_size;
    return (struct lg_sides){.height = cells.height ? cells.height : size.height / 8,
                             .width = cells.width ? cells.width : size.width / 8};
}

const char *lg_config_data(const lg_config *c)
{
    return c->data_source.n ? "data.source" : c->data_path;
}

bool lg_config_updates_for_gpu(const lg_config *c)
{
    return c->memory_offload_optimizer && !strcmp(c->_device, "cuda");
}

/* The marked ones, and the one that does on GPUs. */
static bool decides(const lg_key *k, const lg_config *before, const lg_config *now)
{
    if (strcmp(k->name, "memory.offload_optimizer") != 0) return lg_key_bits(k);
    return lg_config_updates_for_gpu(before) || lg_config_updates_for_gpu(now);
}

int lg_config_compatible(const lg_config *old_config, const lg_config *new_config,
                         const struct lg_strlist *except, bool *ret_changed)
{
    struct lg_problems p = {0};
    if (ret_changed) *ret_changed = false;
    char where[LG_PROBLEM_BYTES / 2];
    for (int i = 0; i < lg_key_count(); i++) {
        const lg_key *k = lg_key_at(i);
        const bool may = contains(except, k->name);
        if (!decides(k, old_config, new_config) && !may) continue;
        if (!lg_key_applies(old_config, k) && !lg_key_applies(new_config, k)) continue;
        char *before = value_text(old_config, k), *now = value_text(new_config, k);
        const bool differs = strcmp(before, now) != 0;
        lg_key_where(new_config, k->name, where, sizeof where);
        if (differs && may && ret_changed) *ret_changed = true;
        if (differs && !may)
            lg_problem(&p,
                       "%s%s was %.80s when the run began and is %.80s now; it decides the result "
                       "and cannot change at a resume: set it back, %sor choose another job.dir",
                       where, k->name, before, now,
                       lg_config_may_change(k->name) ? "name it in trainer.resume_changes, " : "");
        free(before);
        free(now);
    }
    if (new_config->trainer_max_steps < old_config->trainer_max_steps) {
        lg_key_where(new_config, "trainer.max_steps", where, sizeof where);
        lg_problem(&p,
                   "%strainer.max_steps was %lld when the run began and is %lld now; it may only "
                   "grow at a resume: set it to at least %lld",
                   where, (long long)old_config->trainer_max_steps,
                   (long long)new_config->trainer_max_steps,
                   (long long)old_config->trainer_max_steps);
    }
    return lg_problems_end(&p, LG_ERR_MISMATCH, "the run cannot go on with this config");
}

/* ---- docs/config.md ---- */

static const char intro[] =
    "# Configuration\n\n"
    "Generated from `config/schema.def`, `config/scripts.def` and `config/litegen.def`; a test "
    "compares this page with "
    "them. Regenerate it with `LG_REGENERATE=1 build/tests/test_config`.\n\n"
    "A run is described by one TOML file, `pipeline.toml`: a table per role, every key optional "
    "unless a rule below asks for it. An unknown key is an error that names the nearest known "
    "one.\n"
    "\n"
    "- `lgsup start FILE --set section.key=value` overrides any key, as often as needed; later "
    "ones "
    "win. The value is TOML; text needs no quotes (`--set trainer.objective=eps`).\n"
    "- Relative paths in the file start at the file's folder, those in `--set` at the working "
    "directory.\n"
    "- The effective config, every key with its final value, is saved in the run directory.\n"
    "- **bits**: the key decides the result. It cannot change when a stopped run is started again; "
    "the attempt is refused with the key's name. Everything else may change at a resume; "
    "`trainer.max_steps` may only grow.\n"
    "- Where a run starts: with `trainer.auto_resume` (default) from the newest complete "
    "checkpoint "
    "in `job.dir`; if there is none, from `trainer.resume_from`; else with the weights of "
    "`trainer.init_from`; else from seeded random weights.\n\n"
    "## Rules between keys\n\n"
    "`lgsup check` reports all that are broken, with the values and what to change.\n\n"
    "- `trainer.global_batch_size` divides by `trainer.ranks`, a rank's share by "
    "`trainer.micro_batch_size`.\n"
    "- The window, `window.batches * trainer.global_batch_size` samples, is a multiple of every "
    "`chunk` in use and holds at least two batches plus `instances * chunk` of each role.\n"
    "- `vae.slice` is at most `vae.chunk`, with clips `data.frames`.\n"
    "- `model.hidden` divides by `model.heads` and by 4 (the position embedding has sine and "
    "cosine "
    "of two coordinates).\n"
    "- `data.size` divides by the VAE's factor times `model.patch`.\n"
    "- `model.kind = \"pixart\"` needs `text.model`; with `\"dit\"` the text encoder is not "
    "started "
    "and `sample.captions` holds labels below `model.num_classes`.\n"
    "- `trainer.min_snr_gamma` is for `eps` and `v`, not for `flow`.\n"
    "- `trainer.beta1` and `trainer.beta2` are below 1; a falling schedule is longer than its "
    "warm-up.\n"
    "- Folders and files that are named exist and have what their layout asks for.\n";

#define LG_ENCODER(name) " `[text." #name "]`"
static const char encoders[] =
    "\n## `[text.NAME]`\n\n"
    "One encoder of a model that has several, by the name of its part:"
#include "config/encoders.def"
    ". Every key of `[text]`, for it alone. What is not written is as in `[text]`, `length` as "
    "the model's "
    "authors have it. The encoder's processes are a role of their own, called `text.NAME`. Of a "
    "model with one encoder, `[text.NAME]` with its name is another word for `[text]`.\n";
#undef LG_ENCODER

/* A table cell: '|' would end it. */
static void print_cell(FILE *out, const char *s)
{
    for (; *s; s++) {
        if (*s == '|') fputc('\\', out);
        fputc(*s, out);
    }
}

static void print_default(FILE *out, const lg_key *k)
{
    switch (k->type) {
    case LG_KEY_INT:
    case LG_KEY_SIDES:
        fprintf(out, "`%lld`", (long long)k->int_def);
        return;
    case LG_KEY_NUM:
        fprintf(out, "`%g`", k->num_def);
        return;
    case LG_KEY_BOOL:
        fputs(k->bool_def ? "`true`" : "`false`", out);
        return;
    case LG_KEY_LIST:
    case LG_KEY_TABLES:
        fputs("`[]`", out);
        return;
    default:
        fprintf(out, "`\"%s\"`", k->text_def);
        return;
    }
}

/* before: of the name, as "data.source[]." */
static void print_row(FILE *out, const char *before, const lg_key *k)
{
    char expected[200];
    lg_key_expected(k, expected, sizeof expected);
    fprintf(out, "| `%s%s` | ", before, k->name);
    print_cell(out, expected);
    fputs(" | ", out);
    print_default(out, k);
    fprintf(out, " | %s | ", lg_key_bits(k) ? "bits" : "");
    print_cell(out, lg_key_doc(k));
    fputs(" |\n", out);
}

static void print_key_row(FILE *out, const lg_key *k)
{
    char before[64];
    print_row(out, "", k);
    snprintf(before, sizeof before, "%s[].", k->name);
    for (int i = 0; k->type == LG_KEY_TABLES && lg_source_key_at(i); i++)
        print_row(out, before, lg_source_key_at(i));
}

/* What others call a key; ours: "", not in this version. */
struct other_name {
    const char *theirs, *ours, *note;
};

static void print_other_names(FILE *out, const struct other_name *v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fprintf(out, v[i].ours[0] ? "| `%s` | `%s` | " : "| `%s` | %s| ", v[i].theirs, v[i].ours);
        print_cell(out, v[i].note);
        fputs(" |\n", out);
    }
}

char *lg_config_markdown(void)
{
    static const struct other_name litegen[] = {
#define LG_LITEGEN(theirs, ours, note) {theirs, ours, note},
#include "config/litegen.def"
#undef LG_LITEGEN
    };
    static const struct other_name scripts[] = {
#define LG_SCRIPT(theirs, ours, note) {theirs, ours, note},
#include "config/scripts.def"
#undef LG_SCRIPT
    };
    char *text = NULL;
    size_t bytes = 0;
    bool told = false;
    FILE *out = open_text(&text, &bytes);
    fputs(intro, out);
    for (int s = 0; s < lg_section_count; s++) {
        const lg_section *section = &lg_sections[s];
        if (!strncmp(section->name, "text.", 5)) {
            if (!told) fputs(encoders, out);
            told = true;
            continue;
        }
        if (section->name[0])
            fprintf(out, "\n## `[%s]`\n\n%s.\n\n", section->name, section->doc);
        else
            fprintf(out, "\n## %s\n\nAbove the first table of the file.\n\n", section->doc);
        fputs("| key | value | default | | meaning |\n|---|---|---|---|---|\n", out);
        for (int i = 0; i < lg_key_count(); i++)
            if (strcmp(lg_key_at(i)->section, section->name) == 0) print_key_row(out, lg_key_at(i));
    }
    fputs("\n## Coming from scripts in Python\n\n| diffusers' examples | here | |\n|---|---|---|\n",
          out);
    print_other_names(out, scripts, LG_ARRAY_LEN(scripts));
    fputs("\n## Coming from LiteGen\n\n| LiteGen | here | |\n|---|---|---|\n", out);
    print_other_names(out, litegen, LG_ARRAY_LEN(litegen));
    LG_ASSERT(lg_close_text(out) == 0);
    return text;
}
