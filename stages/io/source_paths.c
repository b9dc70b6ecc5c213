/* Expansion of data.path; see source_paths.h.
 *
 * The text is cut at commas outside braces; braces are expanded here ({a,b} and the numeric ranges
 * {000..127} that shard lists are usually written with), the rest by glob(3). A name that exists is
 * always taken literally, whatever characters it has. */
#include "stages/io/source_paths.h"
#include "base/beneath.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include <ctype.h>
#include <dirent.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PLACES_MAX = 1 << 20, BRACES_MAX = 8 };

struct list {
    struct lg_place *at;
    size_t count, capacity;
};

static int add(struct list *l, const char *path, bool is_folder)
{
    if (l->count == PLACES_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "data.path names more than %d shards", PLACES_MAX);
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 16;
        struct lg_place *p = realloc(l->at, capacity * sizeof *p);
        if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of shards");
        l->at = p;
        l->capacity = capacity;
    }
    lg_heartbeat();
    char *copy = strdup(path);
    if (!copy) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of shards");
    l->at[l->count++] = (struct lg_place){copy, is_folder};
    return 0;
}

static bool has_suffix(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n > m && strcmp(s + n - m, suffix) == 0;
}

void lg_links_out_add(struct lg_links_out *links, const char *path)
{
    /* The least of the names, whatever order the folder has. */
    if (links->count++ == 0 || strncmp(path, links->first, sizeof links->first - 1) < 0)
        snprintf(links->first, sizeof links->first, "%s", path);
}

void lg_links_out_log(const struct lg_links_out *links, const char *folder)
{
    if (links->count)
        lg_log(LG_WARN,
               "%s: %zu links that lead out of the folder are left out, the first is %s; move what "
               "they name into the folder, or name it in data.path",
               folder, links->count, links->first);
}

/* A link out of the folder is none of its files; one that leads nowhere is, and fails to open. */
static int add_tar(struct list *l, const char *folder, const char *file, struct lg_links_out *out)
{
    int why;
    if (lg_is_beneath(folder, file, &why) || (!why && !lg_path_exists(file))) {
        LG_TRY(add(l, file, false));
        return 0;
    }
    if (why) return LG_FAIL(LG_ERR_IO, "cannot follow %s: %s", file, strerror(why));
    lg_links_out_add(out, file);
    return 0;
}

/* The .tar files of a folder; one without any is a plain folder. */
static int add_folder(struct list *l, const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        return LG_FAIL(lg_err_from_errno(errno), "cannot read the folder %s: %s", path,
                       strerror(errno));
    int rc = 0;
    size_t before = l->count, len = strlen(path);
    struct lg_links_out out = {0};
    while (len > 1 && path[len - 1] == '/') len--;
    for (struct dirent *e; rc == 0 && (e = readdir(dir));) {
        char file[LG_PATH_BYTES];
        if (e->d_name[0] == '.' || !has_suffix(e->d_name, ".tar")) continue;
        rc = lg_path(file, "%.*s/%s", (int)len, path, e->d_name);
        if (rc == 0) rc = add_tar(l, path, file, &out);
    }
    closedir(dir);
    if (rc == 0) lg_links_out_log(&out, path);
    if (rc == 0 && l->count == before) rc = add(l, path, true);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* Adds what lies under an existing name; *ret_found says whether it exists. */
static int add_existing(struct list *l, const char *path, bool *ret_found)
{
    struct stat st;
    *ret_found = stat(path, &st) == 0;
    if (!*ret_found) return 0;
    if (S_ISDIR(st.st_mode)) LG_TRY(add_folder(l, path));
    if (S_ISREG(st.st_mode)) LG_TRY(add(l, path, false));
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode))
        return LG_FAIL(LG_ERR_CONFIG, "data.path: %s is neither a file nor a folder", path);
    return 0;
}

static int add_glob(struct list *l, const char *pattern)
{
    bool found;
    LG_TRY(add_existing(l, pattern, &found));
    if (found) return 0;
    glob_t g;
    int bad = glob(pattern, 0, NULL, &g);
    if (bad == GLOB_NOMATCH)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: nothing at %s; give a .tar, a folder of .tar files or of "
                       "pictures, a pattern, or a comma-separated list of these",
                       pattern);
    if (bad) return LG_FAIL(LG_ERR_IO, "data.path: cannot search for %s", pattern);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < g.gl_pathc; i++) rc = add_existing(l, g.gl_pathv[i], &found);
    globfree(&g);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* The brace that closes s[0] == '{', or NULL. */
static const char *closing(const char *s)
{
    int depth = 0;
    for (; *s; s++) {
        depth += (*s == '{') - (*s == '}');
        if (depth == 0) return s;
    }
    return NULL;
}

static int expand(struct list *l, const char *pattern, int depth);

/* "{000..127}": digits at both ends; the width of the first is kept. */
static int expand_range(struct list *l, const char *head, int head_len, const char *in, int in_len,
                        const char *tail, int depth, bool *ret_is_range)
{
    unsigned long from, to;
    int used = 0, width = 0;
    char copy[64];
    *ret_is_range = false;
    if (in_len >= (int)sizeof copy || !isdigit((unsigned char)in[0])) return 0;
    memcpy(copy, in, (size_t)in_len);
    copy[in_len] = 0;
    if (sscanf(copy, "%9lu%n..%9lu%n", &from, &width, &to, &used) != 2 || used != in_len) return 0;
    *ret_is_range = true;
    if (to < from || to - from >= PLACES_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "data.path: {%s} is empty or too long", copy);
    for (unsigned long i = from; i <= to; i++) {
        char p[LG_PATH_BYTES];
        LG_TRY(lg_path(p, "%.*s%0*lu%s", head_len, head, width, i, tail));
        LG_TRY(expand(l, p, depth + 1));
    }
    return 0;
}

static int expand(struct list *l, const char *pattern, int depth)
{
    const char *open = strchr(pattern, '{'), *close = open ? closing(open) : NULL;
    if (!close || lg_path_exists(pattern)) {
        LG_TRY(add_glob(l, pattern));
        return 0;
    }
    if (depth == BRACES_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "data.path: more than %d braces in %s", BRACES_MAX, pattern);
    bool is_range;
    LG_TRY(expand_range(l, pattern, (int)(open - pattern), open + 1, (int)(close - open - 1),
                        close + 1, depth, &is_range));
    if (is_range) return 0;
    int level = 0;
    for (const char *from = open + 1, *s = from; s <= close; s++) {
        level += (*s == '{') - (*s == '}' && s != close);
        if (level > 0 || (*s != ',' && s != close)) continue;
        char p[LG_PATH_BYTES];
        LG_TRY(lg_path(p, "%.*s%.*s%s", (int)(open - pattern), pattern, (int)(s - from), from,
                       close + 1));
        LG_TRY(expand(l, p, depth + 1));
        from = s + 1;
    }
    return 0;
}

/* Cuts at commas outside braces; white space around a part is dropped. */
static int split(struct list *l, const char *path)
{
    char part[LG_PATH_BYTES];
    for (const char *s = path; *s;) {
        const char *end = s + lg_path_list_part(s);
        const char *next = *end ? end + 1 : end;
        while (s < end && isspace((unsigned char)*s)) s++;
        while (end > s && isspace((unsigned char)end[-1])) end--;
        LG_TRY(lg_path(part, "%.*s", (int)(end - s), s));
        if (part[0]) LG_TRY(expand(l, part, 0));
        s = next;
    }
    return 0;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct lg_place *)a)->path, ((const struct lg_place *)b)->path);
}

int lg_places_find(const char *path, struct lg_place **ret, size_t *ret_count)
{
    struct list l = {0};
    int rc = lg_path_exists(path) ? add_glob(&l, path) : split(&l, path);
    if (rc == 0 && l.count == 0) rc = LG_FAIL(LG_ERR_CONFIG, "data.path is empty");
    if (rc < 0) {
        lg_places_free(&l.at, l.count);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    qsort(l.at, l.count, sizeof *l.at, by_path);
    size_t kept = 1;
    for (size_t i = 1; i < l.count; i++) {
        if (strcmp(l.at[i].path, l.at[kept - 1].path) == 0)
            free(l.at[i].path);
        else
            l.at[kept++] = l.at[i];
    }
    *ret = l.at;
    *ret_count = kept;
    return 0;
}

void lg_places_free(struct lg_place **places, size_t count)
{
    for (size_t i = 0; *places && i < count; i++) free((*places)[i].path);
    free(*places);
    *places = NULL;
}
