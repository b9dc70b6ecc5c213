/* `lgsup logs`; see logs.h. Every log line begins with its UTC time, so sorting lines by their first
 * 24 bytes merges files; a line without a time stays with the one before it. Libraries write into
 * these files too, so every line is made printable. */
#include "supervisor/commands/logs.h"
#include "base/printable.h"
#include "supervisor/commands/elsewhere.h"
#include "supervisor/commands/log_files.h"
#include "supervisor/run/waiting.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ELSEWHERE_MS = 2000,             /* how long another host is waited for */
    ELSEWHERE_BYTES_MAX = 512 << 20, /* of all others at a time */
    STAMP_BYTES = 24,
    FOLLOW_MS = 200
};

struct line {
    const char *stamp; /* of this line or the nearest one above with a stamp; "" */
    const char *text;
    size_t bytes, order;
    int machine;
};

/* What one look has brought of a file. */
struct text {
    const struct lg_log_file *of;
    char *bytes;
    size_t n;
    int machine;
};

struct lines {
    struct line *v;
    size_t n, cap;
};

struct texts {
    struct text *v;
    size_t n, cap, bytes;
};

/* Of one machine. */
struct files {
    struct lg_log_file *v; /* (LG_LOG_FILES_MAX) */
    int n;
};

struct logs {
    struct lg_logs_args args;
    lg_elsewhere *elsewhere;        /* NULL: the run has one host */
    struct files of[LG_PLACES_MAX]; /* by machine; this one's are of[own] */
    int own;                        /* 0 with one host */
    bool silent[LG_PLACES_MAX];     /* was said */
    bool unread;                    /* whoever read the output has gone */
};

static bool has_stamp(const char *text, size_t bytes)
{
    return bytes > STAMP_BYTES && text[4] == '-' && text[10] == 'T' && text[23] == 'Z';
}

static void cut_lines(const struct text *t, struct lines *l)
{
    const char *text = t->bytes;
    const size_t bytes = t->n;
    const char *stamp = "";
    for (const char *at = text, *end = text + bytes; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = stop ? (size_t)(stop - at) + 1 : (size_t)(end - at);
        if (has_stamp(at, n)) stamp = at;
        if (l->n == l->cap) {
            l->cap = l->cap ? 2 * l->cap : 1024;
            l->v = realloc(l->v, l->cap * sizeof *l->v);
            LG_ASSERT(l->v);
        }
        l->v[l->n] = (struct line){
            .stamp = stamp, .text = at, .bytes = n, .order = l->n, .machine = t->machine};
        l->n++;
        at += n;
    }
}

static int by_time(const void *a, const void *b)
{
    const struct line *x = a, *y = b;
    int c = strncmp(x->stamp, y->stamp, STAMP_BYTES);
    return c ? c : (x->order > y->order) - (x->order < y->order);
}

/* Takes `bytes` over. What has come of that file already goes on, or a line without a time would have none. */
static void add_text(struct texts *t, const struct text *new)
{
    t->bytes += new->n;
    for (size_t i = 0; i < t->n; i++) {
        struct text *old = &t->v[i];
        if (old->of != new->of) continue;
        old->bytes = realloc(old->bytes, old->n + new->n);
        LG_ASSERT(old->bytes);
        memcpy(old->bytes + old->n, new->bytes, new->n);
        old->n += new->n;
        free(new->bytes);
        return;
    }
    if (t->n == t->cap) {
        t->cap = t->cap ? 2 * t->cap : 64;
        t->v = realloc(t->v, t->cap * sizeof *t->v);
        LG_ASSERT(t->v);
    }
    t->v[t->n++] = *new;
}

static void read_own(struct logs *l, struct texts *t)
{
    struct files *f = &l->of[l->own];
    for (int i = 0; i < f->n; i++) {
        size_t bytes = 0;
        char *text = lg_log_file_read(&f->v[i], l->args.follow, &bytes);
        if (text) add_text(t, &(struct text){&f->v[i], text, bytes, l->own});
    }
}

/* By time; of several hosts each line says from which it is. */
static void show(struct logs *l, struct texts *t)
{
    struct lines all = {0};
    for (size_t i = 0; i < t->n; i++) cut_lines(&t->v[i], &all);
    if (all.n) qsort(all.v, all.n, sizeof *all.v, by_time);
    for (size_t i = 0; i < all.n; i++) {
        size_t bytes = all.v[i].bytes;
        bytes -= all.v[i].text[bytes - 1] == '\n'; /* not there: a process's last words */
        if (l->elsewhere) {
            const struct lg_machine *m = &l->elsewhere->machine[all.v[i].machine];
            printf(m->host >= 0 ? "host %-2d " : "machine %-2d ",
                   m->host >= 0 ? m->host : m->place);
        }
        lg_print_text(stdout, all.v[i].text, bytes, LG_NEWLINES_ESCAPED);
        putchar('\n');
    }
    errno = 0;
    l->unread = fflush(stdout) != 0 && errno == EPIPE;
    for (size_t i = 0; i < t->n; i++) free(t->v[i].bytes);
    free(t->v);
    free(all.v);
    *t = (struct texts){0};
}

/* ---- other hosts: asking ---- */

static void ask_logs(struct logs *l, int i, struct lg_question *q)
{
    const struct files *f = &l->of[i];
    memset(q, 0, sizeof *q);
    q->kind = LG_QUESTION_logs;
    q->flag = l->args.follow;
    if (l->args.role) snprintf(q->text, sizeof q->text, "%s", l->args.role);
    for (int k = 0; k < f->n && k < LG_QUESTION_FILES_MAX; k++) {
        q->file[k].name = lg_hash(f->v[k].name, strlen(f->v[k].name));
        q->file[k].shown = f->v[k].shown;
        q->n_files++;
    }
    lg_elsewhere_put(l->elsewhere, i, q);
}

static struct lg_log_file *file_named(struct files *f, const char *name)
{
    for (int i = 0; i < f->n; i++)
        if (!strcmp(f->v[i].name, name)) return &f->v[i];
    if (f->n == LG_LOG_FILES_MAX) return NULL;
    struct lg_log_file *new = &f->v[f->n++];
    *new = (struct lg_log_file){0};
    snprintf(new->name, sizeof new->name, "%s", name);
    return new;
}

/* Sizes are checked: it is another machine that says them. */
static void take_pieces(struct logs *l, int i, struct texts *t)
{
    const struct lg_machine *m = &l->elsewhere->machine[i];
    struct lg_log_piece p;
    for (size_t at = 0; at + sizeof p <= m->bytes; at += p.bytes) {
        memcpy(&p, m->text + at, sizeof p);
        at += sizeof p;
        if (!memchr(p.name, 0, sizeof p.name) || p.bytes > m->bytes - at) return;
        struct lg_log_file *f = file_named(&l->of[i], p.name);
        char *copy = f && p.bytes ? malloc(p.bytes) : NULL;
        if (!copy) continue;
        memcpy(copy, m->text + at, p.bytes);
        add_text(t, &(struct text){f, copy, p.bytes, i});
        f->shown = p.shown;
    }
}

static void say_silence(struct logs *l, int i)
{
    char name[LG_MACHINE_NAME_BYTES], why[LG_MACHINE_WHY_BYTES];
    const struct lg_machine *m = &l->elsewhere->machine[i];
    const char *is = lg_machine_why_not(m, why);
    const bool waits = m->answered && !m->code; /* a machine to spare has no logs */
    if (is && !waits && !l->silent[i]) lg_print(stderr, "%s %s\n", lg_machine_name(m, name), is);
    l->silent[i] = is != NULL;
}

/* One question to each of the others. True: some have more. */
static bool read_others(struct logs *l, struct lg_question *q, struct texts *t)
{
    bool more = false;
    lg_elsewhere *e = l->elsewhere;
    lg_elsewhere_look(e);
    for (int i = 0; i < e->n; i++)
        if (i != e->own && e->machine[i].wanted) ask_logs(l, i, q);
    lg_elsewhere_wait(e, ELSEWHERE_MS);
    for (int i = 0; i < e->n; i++) {
        const struct lg_machine *m = &e->machine[i];
        if (i == e->own || !m->wanted) continue;
        say_silence(l, i);
        if (!m->answered || m->code || !m->bytes) continue;
        take_pieces(l, i, t);
        more |= m->more;
    }
    return more;
}

/* ---- the command ---- */

static bool wants_own(const struct logs *l)
{
    return !l->elsewhere || l->elsewhere->machine[l->own].wanted;
}

/* Everything there is, or what is new. */
static int look(struct logs *l, struct lg_question *q, bool first)
{
    struct texts t = {0};
    struct files *own = &l->of[l->own];
    if (wants_own(l)) {
        LG_TRY(lg_log_files_find(l->args.dir, l->args.role, own->v, &own->n));
        read_own(l, &t);
    }
    while (l->elsewhere && read_others(l, q, &t) && t.bytes < ELSEWHERE_BYTES_MAX) {
    }
    if (first && !t.n && !l->args.follow && (!l->elsewhere || wants_own(l)) && !own->n) {
        LG_TRY(lg_waiting_refuse(l->args.dir));
        return LG_FAIL(LG_ERR_NOTFOUND, "no log of %s in %s/logs",
                       l->args.role ? l->args.role : "any process", l->args.dir);
    }
    show(l, &t);
    return 0;
}

static int run(struct logs *l, struct lg_question *q)
{
    LG_TRY(look(l, q, true));
    while (l->args.follow && !ferror(stdout)) {
        poll(NULL, 0, FOLLOW_MS);
        LG_TRY(look(l, q, false));
    }
    if (l->args.follow && l->unread) clearerr(stdout); /* which is its end */
    return 0;
}

static int open_logs(struct logs *l)
{
    LG_TRY(lg_elsewhere_open(l->args.dir, l->args.host, &l->elsewhere));
    l->own = l->elsewhere ? l->elsewhere->own : 0;
    for (int i = 0; i < (l->elsewhere ? l->elsewhere->n : 1); i++) {
        l->of[i].v = calloc(LG_LOG_FILES_MAX, sizeof *l->of[i].v);
        if (!l->of[i].v) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of logs");
    }
    return 0;
}

int lg_logs(const struct lg_logs_args *args)
{
    struct logs *l = calloc(1, sizeof *l);
    struct lg_question *q = malloc(sizeof *q);
    int rc = l && q ? 0 : LG_FAIL(LG_ERR_NOSPACE, "no memory for logs");
    if (rc == 0) {
        l->args = *args;
        rc = open_logs(l);
    }
    if (rc == 0) rc = run(l, q);
    for (int i = 0; l && i < LG_PLACES_MAX; i++) free(l->of[i].v);
    if (l) lg_elsewhere_close(&l->elsewhere);
    free(q);
    free(l);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
