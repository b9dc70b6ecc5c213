/* The command line; see cli.h. commands.def lists the commands; each has a function here that takes
 * the words after its name. */
#include "supervisor/commands/cli.h"
#include "base/inherit.h"
#include "supervisor/commands/check.h"
#include "supervisor/commands/doctor.h"
#include "supervisor/commands/export.h"
#include "supervisor/commands/hosts.h"
#include "supervisor/commands/logs.h"
#include "supervisor/commands/order.h"
#include "supervisor/commands/start.h"
#include "supervisor/commands/units_write.h"
#include "supervisor/commands/verify.h"
#include "supervisor/commands/whole.h"
#include "supervisor/hosts/keys.h"
#include "supervisor/launch/role.h"
#include "supervisor/run/child.h"
#include "supervisor/run/signals.h"
#include "supervisor/run/terminal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LG_VERSION "0.1.0"

enum { SETS_MAX = 256, PLACES_MAX = 3, WORDS_MAX = 1024 };

/* Words of a command: places (without a dash), flags, --set. */
struct words {
    const char *place[PLACES_MAX];
    int n_places;
    const char *set[SETS_MAX];
    int n_sets;
    const char *units, *dir, *prefix, *bin, *out, *weights, *format, *memory, *host;
    bool merge, detach, set_aside, json, follow, once, kill, take;
};

struct command {
    const char *name, *arguments, *summary;
    int (*run)(int argc, char **argv, int *ret_exit);
};
#define LG_COMMAND(name, arguments, summary)                                                       \
    static int command_##name(int argc, char **argv, int *ret_exit);
#include "supervisor/commands/commands.def"
#undef LG_COMMAND
static const struct command commands[] = {
#define LG_COMMAND(name, arguments, summary) {#name, arguments, summary, command_##name},
#include "supervisor/commands/commands.def"
#undef LG_COMMAND
};

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(commands); i++)
        if (!strcmp(commands[i].name, name)) return &commands[i];
    return NULL;
}

static int no_command(const char *name)
{
    return LG_FAIL(LG_ERR_USAGE, "there is no command %s; `lgsup help` lists them", name);
}

static int usage(const char *name)
{
    const struct command *c = find_command(name);
    return LG_FAIL(LG_ERR_USAGE, "usage: lgsup %s%s%s", name, *c->arguments ? " " : "",
                   c->arguments);
}

/* Programs of their own, which explain themselves. */
static bool is_program(const struct command *c)
{
    return c->run == command_encode || c->run == command_decode || c->run == command_sample;
}

static int print_help(const struct command *c)
{
    printf("lgsup %s%s%s\n    %s\n", c->name, *c->arguments ? " " : "", c->arguments, c->summary);
    if (is_program(c)) printf("    `lgsup %s --help` lists every option\n", c->name);
    return 0;
}

/* "lgsup start --help", wherever it stands. */
static bool asks_for_help(const struct command *c, int argc, char **argv)
{
    for (int i = 0; i < argc && !is_program(c); i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return true;
    return false;
}

/* ---- words ---- */

static int take_set(int argc, char **argv, int *i, struct words *w)
{
    const char *value = argv[*i][5] == '=' ? argv[*i] + 6 : *i + 1 < argc ? argv[++*i] : NULL;
    if (!value || !strchr(value, '=') || value[0] == '=')
        return LG_FAIL(LG_ERR_USAGE, "--set needs section.key=value; got %s",
                       value ? value : "nothing");
    if (w->n_sets == SETS_MAX) return LG_FAIL(LG_ERR_USAGE, "more than %d --set", SETS_MAX);
    w->set[w->n_sets++] = value;
    return 0;
}

/* A flag with a value: "--dir X". *ret_value stays when the word is another. */
static int take_value(const char *flag, int argc, char **argv, int *i, const char **ret_value)
{
    if (*i + 1 == argc) return LG_FAIL(LG_ERR_USAGE, "%s needs a value", flag);
    *ret_value = argv[++*i];
    return 0;
}

/* allowed: the flags of this command, as in "--detach --set" (whole words). */
static int parse(const char *name, const char *allowed, int argc, char **argv, struct words *ret)
{
    *ret = (struct words){0};
    for (int i = 0; i < argc; i++) {
        const char *a = argv[i];
        if (a[0] != '-' || !a[1]) {
            if (ret->n_places == PLACES_MAX) return usage(name);
            ret->place[ret->n_places++] = a;
        } else if (!strncmp(a, "--set", 5) && (!a[5] || a[5] == '=') && strstr(allowed, "--set")) {
            LG_TRY(take_set(argc, argv, &i, ret));
        } else if (!strcmp(a, "--bin") && strstr(allowed, "--bin")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->bin));
        } else if (!strcmp(a, "--detach") && strstr(allowed, "--detach")) {
            ret->detach = true;
        } else if (!strcmp(a, "--set-aside") && strstr(allowed, "--set-aside")) {
            ret->set_aside = true;
        } else if (!strcmp(a, "--units") && strstr(allowed, "--units")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->units));
        } else if (!strcmp(a, "--dir") && strstr(allowed, "--dir")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->dir));
        } else if (!strcmp(a, "--prefix") && strstr(allowed, "--prefix")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->prefix));
        } else if (!strcmp(a, "-o") && strstr(allowed, "-o ")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->out));
        } else if (!strcmp(a, "--weights") && strstr(allowed, "--weights")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->weights));
        } else if (!strcmp(a, "--memory") && strstr(allowed, "--memory")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->memory));
        } else if (!strcmp(a, "--host") && strstr(allowed, "--host")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->host));
        } else if (!strcmp(a, "--format") && strstr(allowed, "--format")) {
            LG_TRY(take_value(a, argc, argv, &i, &ret->format));
        } else if (!strcmp(a, "--merge") && strstr(allowed, "--merge")) {
            ret->merge = true;
        } else if (!strcmp(a, "--json") && strstr(allowed, "--json")) {
            ret->json = true;
        } else if (!strcmp(a, "--kill") && strstr(allowed, "--kill")) {
            ret->kill = true;
        } else if (!strcmp(a, "--take") && strstr(allowed, "--take")) {
            ret->take = true;
        } else if (!strcmp(a, "--once") && strstr(allowed, "--once")) {
            ret->once = true;
        } else if ((!strcmp(a, "-f") || !strcmp(a, "--follow")) && strstr(allowed, "-f")) {
            ret->follow = true;
        } else {
            return LG_FAIL(LG_ERR_USAGE, "lgsup %s does not know %s; usage: lgsup %s %s", name, a,
                           name, find_command(name)->arguments);
        }
    }
    return 0;
}

static int parse_one_place(const char *name, const char *allowed, int argc, char **argv,
                           struct words *ret)
{
    LG_TRY(parse(name, allowed, argc, argv, ret));
    return ret->n_places == 1 ? 0 : usage(name);
}

/* ---- commands ---- */

static int command_start(int argc, char **argv, int *ret_exit)
{
    struct words w;
    LG_TRY(parse_one_place("start", "--detach --set-aside --set --units", argc, argv, &w));
    if (w.units && (w.detach || w.set_aside || !lg_units_is_prefix(w.units))) return usage("start");
    LG_TRY(lg_start(&(struct lg_start_args){.file = w.place[0],
                                            .set = w.set,
                                            .n_set = w.n_sets,
                                            .detach = w.detach,
                                            .set_aside = w.set_aside,
                                            .units = w.units},
                    ret_exit));
    return 0;
}

static int command_units(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("units", "--set --dir --prefix", argc, argv, &w));
    LG_TRY(lg_units_write(&(struct lg_units_args){
        .file = w.place[0], .set = w.set, .n_set = w.n_sets, .dir = w.dir, .prefix = w.prefix}));
    return 0;
}

static int command_role(int argc, char **argv, int *ret_exit)
{
    *ret_exit = 0;
    if (argc != 3) return usage("role");
    LG_TRY(lg_units_role(argv[0], argv[1], argv[2]));
    return 0;
}

static int command_stop(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("stop", "--units --kill", argc, argv, &w));
    if (w.units && (w.kill || !lg_units_is_prefix(w.units))) return usage("stop");
    if (w.kill)
        LG_TRY(lg_stop_kill(w.place[0]));
    else
        LG_TRY(lg_stop(w.place[0], w.units, ret_exit));
    return 0;
}

static int command_status(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("status", "--json --host", argc, argv, &w));
    LG_TRY(lg_whole_status(w.place[0], w.host, w.json));
    return 0;
}

static int command_top(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("top", "--once --host", argc, argv, &w));
    LG_TRY(lg_whole_top(w.place[0], w.host, w.once));
    return 0;
}

static int command_logs(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse("logs", "-f --host", argc, argv, &w));
    if (w.n_places < 1 || w.n_places > 2) return usage("logs");
    LG_TRY(lg_logs(&(struct lg_logs_args){.dir = w.place[w.n_places - 1],
                                          .role = w.n_places == 2 ? w.place[0] : NULL,
                                          .host = w.host,
                                          .follow = w.follow}));
    return 0;
}

static int command_scale(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse("scale", "--host", argc, argv, &w));
    if (w.n_places < 2) return usage("scale");
    LG_TRY(lg_order_scale(&(struct lg_order_to){w.n_places == 3 ? w.place[2] : ".", w.host},
                          w.place[0], w.place[1]));
    return 0;
}

static int command_swap(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse("swap", "--bin --host", argc, argv, &w));
    if (w.n_places < 1 || w.n_places > 2) return usage("swap");
    LG_TRY(lg_order_swap(&(struct lg_order_to){w.n_places == 2 ? w.place[1] : ".", w.host},
                         w.place[0], w.bin));
    return 0;
}

static int command_hosts(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("hosts", "--take", argc, argv, &w));
    LG_TRY(lg_hosts_command(w.place[0], w.take));
    return 0;
}

static int command_keys(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("keys", "", argc, argv, &w));
    LG_TRY(lg_cluster_key_make(w.place[0]));
    printf("%s: copy it to every host of the run, and to nobody else\n", w.place[0]);
    return 0;
}

static int command_check(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("check", "--set --memory", argc, argv, &w));
    LG_TRY(lg_check(&(struct lg_check_args){
        .file = w.place[0], .set = w.set, .n_set = w.n_sets, .memory = w.memory}));
    return 0;
}

static int command_verify(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("verify", "", argc, argv, &w));
    LG_TRY(lg_verify(w.place[0]));
    return 0;
}

static int command_export(int argc, char **argv, int *ret_exit)
{
    struct words w;
    *ret_exit = 0;
    LG_TRY(parse_one_place("export", "-o --weights --format --merge", argc, argv, &w));
    if (!w.out) return usage("export");
    LG_TRY(lg_export(&(struct lg_export_args){.from = w.place[0],
                                              .out = w.out,
                                              .weights = w.weights ? w.weights : "ema",
                                              .format = w.format,
                                              .merge = w.merge}));
    return 0;
}

static int command_doctor(int argc, char **argv, int *ret_exit)
{
    (void)argv;
    if (argc) return usage("doctor");
    return lg_doctor(ret_exit);
}

/* Becomes the program; lgsup itself never computes. first: a word before the user's, or NULL. */
static int become(const char *name, const char *first, int argc, char **argv)
{
    char program[LG_PATH_BYTES], *words[WORDS_MAX];
    int n = 0;
    LG_TRY(lg_program_path(name, program));
    if (argc > WORDS_MAX - 3) return LG_FAIL(LG_ERR_USAGE, "more than %d words", WORDS_MAX - 3);
    words[n++] = program;
    if (first) words[n++] = (char *)first;
    for (int i = 0; i < argc; i++) words[n++] = argv[i];
    words[n] = NULL;
    execv(program, words);
    return LG_FAIL(lg_err_from_errno(errno), "cannot run %s: %s", program, strerror(errno));
}

static int command_data(int argc, char **argv, int *ret_exit)
{
    struct words w;
    char *words[1 + 2 * SETS_MAX];
    int n = 0;
    (void)ret_exit;
    LG_TRY(parse_one_place("data", "--set", argc, argv, &w));
    words[n++] = (char *)w.place[0];
    for (int i = 0; i < w.n_sets; i++) {
        words[n++] = (char *)"--set";
        words[n++] = (char *)w.set[i];
    }
    return become("lg-loader", "--look", n, words);
}

static int command_encode(int argc, char **argv, int *ret_exit)
{
    (void)ret_exit;
    return become("lg-encode", NULL, argc, argv);
}

static int command_decode(int argc, char **argv, int *ret_exit)
{
    (void)ret_exit;
    return become("lg-encode", "decode", argc, argv);
}

static int command_sample(int argc, char **argv, int *ret_exit)
{
    (void)ret_exit;
    return become("lg-sample", NULL, argc, argv);
}

static int command_version(int argc, char **argv, int *ret_exit)
{
    (void)argv;
    if (argc) return usage("version");
    puts("lgsup " LG_VERSION);
    *ret_exit = 0;
    return 0;
}

static int command_help(int argc, char **argv, int *ret_exit)
{
    *ret_exit = 0;
    const struct command *one = argc == 1 ? find_command(argv[0]) : NULL;
    if (argc > 1) return usage("help");
    if (argc == 1 && !one) return no_command(argv[0]);
    if (one) return print_help(one);
    puts("lgsup trains diffusion transformers from raw pictures and captions.\n");
    for (size_t i = 0; i < LG_ARRAY_LEN(commands); i++)
        printf("  lgsup %-8s %-40s %s\n", commands[i].name, commands[i].arguments,
               commands[i].summary);
    puts(
        "\nFILE is a pipeline.toml (docs/config.md), DIR a run directory (its job.dir), [DIR] the\n"
        "working directory where it is left out. `lgsup COMMAND --help`: that command alone.\n"
        "Exit codes: docs/exit-codes.md.");
    return 0;
}

/* All that they do is to print; of the others the exit code says what they have done. */
static bool only_prints(const struct command *c)
{
    return c->run == command_status || c->run == command_top || c->run == command_logs ||
           c->run == command_check || c->run == command_verify || c->run == command_doctor ||
           c->run == command_help || c->run == command_version;
}

/* A part of it, on a disk that is full, must not pass for the whole. */
static int end_output(void)
{
    lg_terminal_finish(); /* what was said on stderr comes first */
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return LG_FAIL(errno ? lg_err_from_errno(errno) : LG_ERR_IO, "cannot write the output: %s",
                   errno ? strerror(errno) : "a part of it is missing");
}

void lg_cli_inherit(void)
{
    lg_inherit();
    lg_signals_inherit();
}

int lg_cli_main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "help";
    if (!strcmp(name, "--help") || !strcmp(name, "-h")) name = "help";
    if (!strcmp(name, "--version")) name = "version";
    const struct command *c = find_command(name);
    int exit_code = 0, rc;
    if (c && asks_for_help(c, LG_MAX(argc - 2, 0), argv + LG_MIN(argc, 2)))
        rc = print_help(c);
    else if (c)
        rc = c->run(LG_MAX(argc - 2, 0), argv + LG_MIN(argc, 2), &exit_code);
    else
        rc = no_command(name);
    if (rc == 0 && c && only_prints(c)) rc = end_output();
    if (rc < 0)
        lg_terminal_say(STDERR_FILENO, "lgsup: %s\n",
                        getenv("LG_TRACE") ? lg_err_text() : lg_err_message());
    lg_err_clear();
    lg_terminal_finish();
    fflush(stdout);
    return rc < 0 ? -rc : exit_code;
}
