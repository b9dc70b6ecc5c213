/* `lgsup top`: one frame as text, or the screen; see top.h.
 *
 * The screen is curses and nothing else: it shows the lines of lg_top_text, cut to the terminal. */
#include "supervisor/views/top.h"
#include <langinfo.h>
#include <locale.h>
#include <ncurses.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { REFRESH_MS = 1000, ONCE_MS = 500, ONCE_COLUMNS = 120 };

struct screen {
    struct lg_top top;
    const struct lg_top_hosts *hosts; /* NULL: one */
    lg_top_line line[LG_TOP_LINES_MAX];
    bool utf8;
};

/* Own, and of others what they say. */
static int read_all(struct screen *s, int columns)
{
    LG_TRY(lg_top_read(&s->top));
    if (s->hosts)
        s->hosts->read(s->hosts->context,
                       &(struct lg_top_look){.columns = columns, .utf8 = s->utf8});
    return 0;
}

/* The chosen host's; *ret_heading of this one only, else 0. */
static int make_frame(struct screen *s, int columns, int *ret_heading)
{
    *ret_heading = 0;
    const int n = s->hosts ? s->hosts->frame(s->hosts->context, s->line, LG_TOP_LINES_MAX) : -1;
    if (n >= 0) return n;
    return lg_top_text(&s->top, &(struct lg_top_look){.columns = columns, .utf8 = s->utf8}, s->line,
                       ret_heading);
}

static void print_hosts(struct screen *s)
{
    const int n = s->hosts->list(s->hosts->context, s->line);
    for (int i = 0; i < n; i++) puts(s->line[i]);
    putchar('\n');
}

static int print_once(struct screen *s)
{
    int heading;
    LG_TRY(read_all(s, ONCE_COLUMNS));
    bool lives = s->hosts != NULL;
    for (int i = 0; i < s->top.status.n_instances; i++) lives |= s->top.status.instance[i].pid != 0;
    if (lives) { /* rates need two readings */
        poll(NULL, 0, ONCE_MS);
        LG_TRY(read_all(s, ONCE_COLUMNS));
    }
    do {
        if (s->hosts) print_hosts(s);
        const int n = make_frame(s, ONCE_COLUMNS, &heading);
        for (int i = 0; i < n; i++) puts(s->line[i]);
        if (s->hosts) putchar('\n');
    } while (s->hosts && s->hosts->next(s->hosts->context));
    return 0;
}

static void put_line(const struct screen *s, int at, int i, bool inverse)
{
    if (inverse) attron(A_REVERSE);
    mvprintw(at, 0, "%-*.*s", inverse ? COLS : 0, LG_TOP_LINE_BYTES, s->line[i]);
    if (inverse) attroff(A_REVERSE);
}

static void show(struct screen *s)
{
    int heading, at = 0;
    erase();
    for (int i = 0, n = s->hosts ? s->hosts->list(s->hosts->context, s->line) : 0;
         i < n && at < LINES; i++)
        put_line(s, at++, i, false);
    const int n = make_frame(s, COLS, &heading);
    for (int i = 0; i < n && at < LINES; i++) put_line(s, at++, i, i == 0 || i == heading);
    refresh();
}

static int show_until_quit(struct screen *s)
{
    for (;;) {
        LG_TRY(read_all(s, COLS));
        show(s);
        int key = getch(); /* waits for REFRESH_MS at most */
        if (key == '\t' && s->hosts) s->hosts->next(s->hosts->context);
        if (key == 'q' || key == 'Q' || key == 27) return 0;
        if (key == KEY_RESIZE) clear();
    }
}

static int run_screen(struct screen *s)
{
    LG_TRY(lg_top_read(&s->top)); /* an error before the screen is taken */
    SCREEN *terminal = newterm(NULL, stdout, stdin);
    if (!terminal)
        return LG_FAIL(LG_ERR_FAILED,
                       "the terminal %s is not known to curses: set TERM, or use --once",
                       getenv("TERM") ? getenv("TERM") : "(no TERM)");
    cbreak();
    noecho();
    keypad(stdscr, TRUE);
    set_escdelay(25);
    curs_set(0);
    timeout(REFRESH_MS);
    int rc = show_until_quit(s);
    endwin();
    delscreen(terminal);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

int lg_top(const char *dir, bool once, const struct lg_top_hosts *hosts)
{
    struct screen *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the screen");
    s->hosts = hosts;
    setlocale(LC_CTYPE, "");
    s->utf8 = !strcmp(nl_langinfo(CODESET), "UTF-8");
    int rc = lg_path(s->top.dir, "%s", dir);
    once |= !isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO);
    if (rc == 0) rc = once ? print_once(s) : run_screen(s);
    lg_top_close(&s->top);
    free(s);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
