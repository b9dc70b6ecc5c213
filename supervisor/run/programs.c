/* DIR/programs; see programs.h. Lines: "run HEX", then "vae.0<TAB>PATH<TAB>FORMER" with "" for the
 * program beside lgsup and "-" for no former. Paths with a tab or a line's end are refused at set. */
#include "supervisor/run/programs.h"
#include "shm/layout.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_BYTES_MAX = 8 << 20 };

void lg_programs_free(lg_programs *p)
{
    for (int i = 0; i < p->n; i++) {
        free(p->v[i].path);
        free(p->v[i].former);
    }
    free(p->v);
    p->v = NULL;
    p->n = 0;
}

static struct lg_program *find(const lg_programs *p, lg_role role, int index)
{
    for (int i = 0; i < p->n; i++)
        if (p->v[i].role == role && p->v[i].index == index) return &p->v[i];
    return NULL;
}

static struct lg_program *add(lg_programs *p, lg_role role, int index)
{
    struct lg_program *v = realloc(p->v, sizeof *v * (size_t)(p->n + 1));
    LG_ASSERT(v);
    p->v = v;
    v[p->n] = (struct lg_program){.role = role, .index = index, .path = strdup("")};
    LG_ASSERT(v[p->n].path);
    return &v[p->n++];
}

static int parse_line(lg_programs *p, char *line)
{
    char *rest = line, *name = strsep(&rest, "\t"), *path = strsep(&rest, "\t"), *former = rest;
    char *dot = strrchr(name, '.'), *end = NULL;
    if (!path || !former || !dot) return LG_ERR_CORRUPT;
    long index = strtol(dot + 1, &end, 10);
    *dot = 0;
    int role = lg_role_find(name);
    if (role < 0 || *end || index < 0 || index >= LG_INSTANCES_MAX) return LG_ERR_CORRUPT;
    if (find(p, (lg_role)role, (int)index)) return LG_ERR_CORRUPT;
    struct lg_program *e = add(p, (lg_role)role, (int)index);
    free(e->path);
    e->path = strdup(path);
    e->former = strcmp(former, "-") ? strdup(former) : NULL;
    return 0;
}

static int parse(lg_programs *p, char *text)
{
    char *rest = text, *line = strsep(&rest, "\n");
    uint64_t run_id;
    if (sscanf(line, "run %" SCNx64, &run_id) != 1) return LG_ERR_CORRUPT;
    if (run_id != p->run_id) return 0; /* an earlier start's */
    while ((line = strsep(&rest, "\n")))
        if (*line && parse_line(p, line) < 0) return LG_ERR_CORRUPT;
    return 0;
}

int lg_programs_load(lg_programs *p, const char *run_dir, uint64_t run_id)
{
    char *text;
    size_t bytes;
    *p = (lg_programs){.run_id = run_id};
    LG_TRY(lg_path(p->file, "%s/programs", run_dir));
    if (!lg_path_exists(p->file)) return 0;
    LG_TRY(lg_read_file(p->file, FILE_BYTES_MAX, &text, &bytes));
    int rc = parse(p, text);
    free(text);
    if (rc < 0)
        return LG_FAIL(rc,
                       "%s is damaged: remove it to go on with the programs beside lgsup, or "
                       "restore it",
                       p->file);
    return 0;
}

const char *lg_programs_get(const lg_programs *p, lg_role role, int index)
{
    const struct lg_program *e = find(p, role, index);
    return e && *e->path ? e->path : NULL;
}

int lg_programs_set(lg_programs *p, lg_role role, int index, const char *path)
{
    if (strpbrk(path, "\t\n"))
        return LG_FAIL(LG_ERR_USAGE, "a program's path must not hold a tab or a line's end: %s",
                       path);
    struct lg_program *e = find(p, role, index);
    if (!e) e = add(p, role, index);
    free(e->former);
    e->former = e->path;
    e->path = strdup(path);
    LG_ASSERT(e->path);
    return 0;
}

bool lg_programs_revert(lg_programs *p, lg_role role, int index)
{
    struct lg_program *e = find(p, role, index);
    if (!e || !e->former) return false;
    free(e->path);
    e->path = e->former;
    e->former = NULL;
    return true;
}

char *lg_programs_text(const lg_programs *p, size_t *ret_bytes)
{
    char *text = NULL;
    *ret_bytes = 0;
    FILE *f = open_memstream(&text, ret_bytes);
    if (!f) return NULL;
    fprintf(f, "run %016" PRIx64 "\n", p->run_id);
    for (int i = 0; i < p->n; i++)
        fprintf(f, "%s.%d\t%s\t%s\n", lg_role_name(p->v[i].role), p->v[i].index, p->v[i].path,
                p->v[i].former ? p->v[i].former : "-");
    if (lg_close_text(f) == 0) return text;
    free(text);
    return NULL;
}

int lg_programs_save(const lg_programs *p)
{
    size_t bytes;
    char *text = lg_programs_text(p, &bytes);
    int rc = text ? lg_publish_file(p->file, text, bytes)
                  : LG_FAIL(LG_ERR_NOSPACE, "no memory to write %s", p->file);
    free(text);
    LG_TRY(rc);
    return 0;
}
