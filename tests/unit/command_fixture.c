/* See command_fixture.h. */
#include "tests/unit/command_fixture.h"
#include "base/check.h"
#include "base/fs.h"
#include "config/ledger.h"
#include "config/manifest.h"
#include "supervisor/commands/cli.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <inttypes.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { ARGS_MAX = 1200, SAID_BYTES_MAX = 4 << 20 };

void (*g_command_before)(void);
static char *g_said;

int command_setup(void **state)
{
    (void)state;
    scratch_make();
    setenv("LG_BIN_DIR", scratch_path("bin"), 1);
    g_command_before = NULL;
    return 0;
}

int command_teardown(void **state)
{
    (void)state;
    scratch_remove();
    free(g_said);
    g_said = NULL;
    lg_err_clear();
    return 0;
}

const char *command_said(void)
{
    return g_said;
}

static void be_command(const char *const *words, const char *out)
{
    static char *argv[ARGS_MAX] = {(char *)"lgsup"};
    int argc = 1;
    for (; words[argc - 1]; argc++) {
        LG_ASSERT(argc + 1 < ARGS_MAX);
        argv[argc] = (char *)words[argc - 1];
    }
    int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    dup2(fd, 1);
    dup2(fd, 2);
    if (g_command_before) g_command_before();
    int code = lg_cli_main(argc, argv);
    fflush(NULL);
    scratch_exit(code);
}

int command(const char *const *words)
{
    char out[LG_PATH_BYTES];
    int status;
    size_t bytes;
    snprintf(out, sizeof out, "%s", scratch_path("out"));
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) be_command(words, out);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    free(g_said);
    g_said = NULL;
    assert_int_equal(lg_read_file(out, SAID_BYTES_MAX, &g_said, &bytes), 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void command_expect(int code, const char *part, const char *const *words)
{
    int got = command(words);
    if (got == code && strstr(g_said, part)) return;
    fputs(g_said, stderr); /* at any length */
    fail_msg("exit %d, expected %d with \"%s\" in what is above", got, code, part);
}

void command_also(const char *part)
{
    if (strstr(g_said, part)) return;
    fputs(g_said, stderr);
    fail_msg("nothing about \"%s\" in what is above", part);
}

void command_never(const char *part)
{
    if (!strstr(g_said, part)) return;
    fputs(g_said, stderr);
    fail_msg("\"%s\" in what is above", part);
}

void command_refuse(int call, int error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = LG_ARRAY_LEN(filter), .filter = filter};
    LG_ASSERT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    LG_ASSERT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

void command_program(const char *name, const char *script)
{
    char path[64], text[8192];
    LG_ASSERT(snprintf(path, sizeof path, "bin/%s", name) < (int)sizeof path);
    LG_ASSERT(snprintf(text, sizeof text, "#!/bin/sh\n%s\n", script) < (int)sizeof text);
    LG_ASSERT(chmod(scratch_write(path, text), 0700) == 0);
}

void command_roles(void)
{
    for (int r = 0; r < LG_ROLE_lgsup; r++)
        command_program(lg_role_program((lg_role)r), "echo '{\"regions\": [], \"private\": []}'");
    command_program("lg-device", "exit 8");
}

const char *command_pipeline(const char *more)
{
    char cwd[1024], toml[4096];
    LG_ASSERT(getcwd(cwd, sizeof cwd));
    scratch_write("data/a.txt", "a caption");
    snprintf(toml, sizeof toml,
             "[job]\nname = \"made\"\ndir = \"run\"\n[data]\npath = \"data\"\n"
             "[text]\nmodel = \"%s/examples/emoji/text_encoder\"\ninstances = 2\n"
             "[vae]\nmodel = \"%s/examples/emoji/vae\"\ninstances = 2\n"
             "[trainer]\nranks = 2\nmax_steps = 60\nglobal_batch_size = 16\n%s",
             cwd, cwd, more);
    return scratch_write("pipeline.toml", toml);
}

void command_run(const char *file, lg_run *ret, lg_board **ret_board)
{
    lg_config *config = NULL;
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES];
    LG_ASSERT(lg_config_load(file, NULL, 0, &config) == 0);
    LG_ASSERT(lg_path(dir, "%s", config->job_dir) == 0);
    lg_run_init(ret, dir);
    LG_ASSERT(lg_run_create(ret) == 0 && lg_run_decide(ret, config) == 0 && lg_run_save(ret) == 0);
    if (!ret_board) return;
    LG_ASSERT(lg_run_path(ret, path, "board") == 0);
    struct lg_board_spec spec = {.plan = &ret->plan,
                                 .lineage = ret->lineage,
                                 .start_step = ret->start_step,
                                 .max_steps = (uint64_t)ret->config->trainer_max_steps};
    LG_ASSERT(lg_board_create(path, &spec, ret_board) == 0);
}

void command_checkpoint(const lg_run *r, uint64_t step)
{
    char dir[LG_PATH_BYTES], file[LG_PATH_BYTES];
    static lg_manifest m;
    uint64_t batch = (uint64_t)r->plan.batch;
    m = (lg_manifest){.step = step,
                      .next_n = step * batch,
                      .plan_hash = r->plan.hash,
                      .lineage = r->lineage,
                      .ranks = r->plan.instances[LG_ROLE_trainer],
                      .threads = 1};
    snprintf(m.name, sizeof m.name, "%s", r->config->job_name);
    snprintf(m.isa, sizeof m.isa, "%s", r->plan.isa);
    LG_ASSERT(lg_run_path(r, dir, "checkpoints/%s_step%" PRIu64, m.name, step) == 0);
    LG_ASSERT(lg_mkdirs(dir) == 0 && lg_path(file, "%s/state", dir) == 0);
    LG_ASSERT(lg_publish_file(file, "a state\n", 8) == 0);
    LG_ASSERT(lg_manifest_add(&m, dir, "state") == 0 && lg_manifest_save(&m, dir) == 0);
    LG_ASSERT(lg_run_path(r, file, "ledger") == 0);
    FILE *f = fopen(file, "w");
    for (uint64_t s = 0; s < step; s++) {
        struct lg_ledger_record record = {
            .step = s + 1, .first = s * batch, .last = (s + 1) * batch - 1, .lineage = r->lineage};
        lg_ledger_seal(&record);
        LG_ASSERT(f && fwrite(&record, sizeof record, 1, f) == 1);
    }
    LG_ASSERT(f && fclose(f) == 0);
}
