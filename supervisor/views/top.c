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
    lg_top_line line[LG_TOP_LINES_MAX];
    bool utf8;
};

static int print_once(struct screen *s)
{
    int heading;
    LG_TRY(lg_top_read(&s->top));
    bool lives = false;
    for (int i = 0; i < s->top.status.n_instances; i++) lives |= s->top.status.instance[i].pid != 0;
    if (lives) { /* rates need two readings */
        poll(NULL, 0, ONCE_MS);
        LG_TRY(lg_top_read(&s->top));
    }
    int n = lg_top_text(&s->top, &(struct lg_top_look){.columns = ONCE_COLUMNS, .utf8 = s->utf8},
                        s->line, &heading);
    for (int i = 0; i < n; i++) puts(s->line[i]);
    return 0;
}

static void show(struct screen *s)
{
    int heading, n = lg_top_text(&s->top, &(struct lg_top_look){.columns = COLS, .utf8 = s->utf8},
                                 s->line, &heading);
    erase();
    for (int i = 0; i < n && i < LINES; i++) {
        bool inverse = i == 0 || i == heading;
        if (inverse) attron(A_REVERSE);
        mvprintw(i, 0, "%-*.*s", inverse ? COLS : 0, LG_TOP_LINE_BYTES, s->line[i]);
        if (inverse) attroff(A_REVERSE);
    }
    refresh();
}

static int show_until_quit(struct screen *s)
{
    for (;;) {
        LG_TRY(lg_top_read(&s->top));
        show(s);
        int key = getch(); /* waits for REFRESH_MS at most */
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

int lg_top(const char *dir, bool once)
{
    struct screen *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the screen");
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
