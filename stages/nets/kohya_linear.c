/* See kohya_private.h. */
#include "stages/nets/adapter_private.h"
#include "stages/nets/kohya_private.h"
#include <stdio.h>
#include <string.h>

static const struct row {
    const char *kind, *ours, *name;
    int part, parts;
    bool is_swapped;
} rows[] = {
#define LG_KOHYA(kind, ours, name, part, parts)         {kind, ours, name, part, parts, false},
#define LG_KOHYA_SWAPPED(kind, ours, name, part, parts) {kind, ours, name, part, parts, true},
#include "stages/nets/kohya.def"
#undef LG_KOHYA
#undef LG_KOHYA_SWAPPED
};

/* ---- names ---- */

/* The digits that stand for the pattern's star, "" without one. False: another module. */
static bool matches(const char *pattern, const char *module, char ret_number[12])
{
    const char *star = strchr(pattern, '*');
    *ret_number = 0;
    if (!star) return !strcmp(pattern, module);
    const size_t head = (size_t)(star - pattern);
    if (strncmp(pattern, module, head)) return false;
    const size_t digits = strspn(module + head, "0123456789");
    if (!digits || digits >= 12 || strcmp(module + head + digits, star + 1)) return false;
    memcpy(ret_number, module + head, digits);
    ret_number[digits] = 0;
    return true;
}

static void with_number(const char *pattern, const char *number, lg_kohya_name ret)
{
    const char *star = strchr(pattern, '*');
    const int head = star ? (int)(star - pattern) : (int)strlen(pattern);
    snprintf(ret, sizeof(lg_kohya_name), "%.*s%s%s", head, pattern, star ? number : "",
             star ? star + 1 : "");
}

/* ---- linears of the original ---- */

static const struct lg_param *find(const lg_params *t, const char *module, const char *tail)
{
    char full[LG_PARAM_NAME_BYTES + 16];
    snprintf(full, sizeof full, "%s%s", module, tail);
    const int i = lg_params_find(t, full);
    return i < 0 ? NULL : &t->p[i];
}

static int add_part(const struct lg_kohya *k, const char *module, struct lg_kohya_linear *l)
{
    const struct lg_param *w = find(k->whole, module, ".weight");
    struct lg_kohya_part *p = &l->part[l->parts++];
    if (!w || w->rank != 2)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s is no linear of the net, as kohya's layout has them: leave it out of "
                       "adapter.targets",
                       module);
    *p = (struct lg_kohya_part){.down = find(k->t, module, LG_ADAPTER_DOWN),
                                .up = find(k->t, module, LG_ADAPTER_UP),
                                .outputs = w->dim[0]};
    l->outputs += p->outputs;
    l->inputs = w->dim[1];
    l->adapted += p->down != NULL;
    if (p->down) l->rank = p->down->dim[0];
    return 0;
}

/* Names of diffusers, for a model without rows. */
static int plain_linear(const struct lg_kohya *k, const char *module, struct lg_kohya_linear *ret)
{
    *ret = (struct lg_kohya_linear){0};
    snprintf(ret->name, sizeof ret->name, "%s", module);
    for (char *s = ret->name; *s; s++)
        if (*s == '.') *s = '_';
    return add_part(k, module, ret);
}

/* The blocks of SDXL have numbers there, in which each level has two layers. */
static bool has_two_layers(const struct lg_kohya *k)
{
    return find(k->whole, "down_blocks.0.resnets.1.conv1", ".weight") &&
           !find(k->whole, "down_blocks.0.resnets.2.conv1", ".weight");
}

/* The linear of which this module is a part. */
static int find_linear(const struct lg_kohya *k, const char *module, struct lg_kohya_linear *ret)
{
    char number[12];
    const struct row *of = NULL;
    bool has_rows = false;
    if (!strcmp(k->kind, "sdxl") && !has_two_layers(k))
        return LG_FAIL(
            LG_ERR_MISMATCH,
            "kohya's layout numbers the blocks as in SDXL, with two layers each; this net has "
            "another layers_per_block: keep its adapter in diffusers' layout");
    for (size_t i = 0; i < LG_ARRAY_LEN(rows) && !of; i++) {
        const bool same = !strcmp(rows[i].kind, k->kind);
        has_rows |= same;
        if (same && matches(rows[i].ours, module, number)) of = &rows[i];
    }
    if (!of && has_rows)
        return LG_FAIL(LG_ERR_MISMATCH,
                       "%s has no name in kohya's layout for a model of kind \"%s\": leave it out "
                       "of adapter.targets",
                       module, k->kind);
    if (!of) return plain_linear(k, module, ret);
    *ret = (struct lg_kohya_linear){.is_swapped = of->is_swapped};
    with_number(of->name, number, ret->name);
    LG_ASSERT(of->parts <= LG_KOHYA_PARTS_MAX);
    for (const struct row *r = of - of->part; r < of - of->part + of->parts; r++) {
        lg_kohya_name part;
        LG_ASSERT(r->parts == of->parts && !strcmp(r->name, of->name)); /* they stand together */
        with_number(r->ours, number, part);
        LG_TRY(add_part(k, part, ret));
    }
    /* More than two outputs a channel are in one order everywhere. */
    ret->is_swapped &= ret->outputs == 2 * ret->inputs;
    return 0;
}

int lg_kohya_linear_at(const struct lg_kohya *k, int i, struct lg_kohya_linear *ret,
                       bool *ret_begins)
{
    const struct lg_param *down = &k->t->p[i];
    lg_kohya_name module;
    *ret_begins = lg_adapter_module(down->name, module);
    if (!*ret_begins) return 0;
    LG_TRY(find_linear(k, module, ret));
    for (int p = 0; p < ret->parts; p++)
        if (ret->part[p].down && ret->part[p].down < down) *ret_begins = false;
    return 0;
}
