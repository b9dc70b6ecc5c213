/* `lgsup doctor`; see doctor.h. */
#include "supervisor/commands/doctor.h"
#include "base/printable.h"
#include "config/plan.h"
#include "supervisor/run/gpus.h"
#include "supervisor/commands/memory.h"
#include "supervisor/run/child.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GIB = 1 << 30 };
enum { HELD_SHARE = 20 }; /* a twentieth of a GPU may be the driver's own and small contexts */

static int g_missing;

static void answer(bool well, bool needed, const char *what, const char *found, const char *advice)
{
    lg_print(stdout, "%-8s %-28s %s\n", well ? "ok" : needed ? "MISSING" : "note", what, found);
    if (!well && *advice) lg_print(stdout, "%-8s %-28s -> %s\n", "", "", advice);
    if (!well && needed) g_missing++;
}

static void ask_kernel(void)
{
    int memfd = memfd_create("doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    answer(memfd >= 0, true, "memfd_create", memfd >= 0 ? "works" : strerror(errno),
           "Linux 3.17 or newer, or a container that allows the call");
    if (memfd >= 0) close(memfd);
    int pidfd = pidfd_open(getpid(), 0);
    bool sent = pidfd >= 0 && pidfd_send_signal(pidfd, 0, NULL, 0) == 0;
    answer(sent, true, "pidfd_open, _send_signal", sent ? "works" : strerror(errno),
           "Linux 5.3 or newer, or a container whose seccomp profile allows the calls");
    if (pidfd >= 0) close(pidfd);
    bool proc = access("/proc/self/stat", R_OK) == 0;
    answer(proc, true, "/proc", proc ? "mounted" : "not mounted", "mount -t proc proc /proc");
}

static void ask_programs(void)
{
    static const char *const tools[] = {"lg-sample", "lg-histogram", "lg-encode", "lg-device"};
    char path[LG_PATH_BYTES];
    for (int r = 0; r < LG_ROLE_lgsup; r++) {
        const char *program = lg_role_program((lg_role)r);
        /* Each text encoder of a model is a role; their program is one. */
        if (r > 0 && !strcmp(program, lg_role_program((lg_role)(r - 1)))) continue;
        bool found = lg_program_path(program, path) == 0;
        answer(found, true, program, found ? path : lg_err_message(), "run `make`, or reinstall");
        lg_err_clear();
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(tools); i++) {
        bool found = lg_program_path(tools[i], path) == 0;
        answer(found, false, tools[i], found ? path : "missing", "run `make`, or reinstall");
        lg_err_clear();
    }
}

/* Loads a backend as a stage would, in a process of its own: lgsup itself stays free of it. */
static bool backend_loads(const char *path, char *why, size_t bytes)
{
    int fds[2];
    why[0] = 0;
    if (pipe(fds) < 0) return false;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        void *h = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
        const char *text = h ? "" : dlerror();
        ssize_t ignored = write(fds[1], text, strlen(text));
        (void)ignored;
        _exit(h ? 0 : 1);
    }
    close(fds[1]);
    ssize_t n = pid < 0 ? -1 : read(fds[0], why, bytes - 1);
    why[n > 0 ? n : 0] = 0;
    close(fds[0]);
    int status = 1;
    if (pid > 0) waitpid(pid, &status, 0);
    return status == 0;
}

/* "139.9 GiB of 140.4 GiB free, kernels of 9.0, CUDA 13.0 of the driver, 13.0 of this build, reaches cuda:1" */
static void describe(const struct lg_run_gpu *g, char *ret, size_t bytes)
{
    char available[32], total[32];
    FILE *out = fmemopen(ret, bytes, "w");
    LG_ASSERT(out);
    fprintf(out, "%s, %s of %s free, kernels of %s, CUDA %s of the driver, %s of this build",
            g->name, lg_bytes_text(g->free_bytes, available), lg_bytes_text(g->total_bytes, total),
            g->kernels, g->driver, g->runtime);
    const char *before = ", reaches cuda:";
    for (int k = 0; k < 64; k++) {
        if (!(g->peers >> k & 1)) continue;
        fprintf(out, "%s%d", before, k);
        before = ",";
    }
    fclose(out);
    ret[bytes - 1] = 0;
}

static void ask_gpu(const struct lg_run_gpu *g)
{
    char what[32], found[768];
    snprintf(what, sizeof what, "cuda:%d", g->number);
    if (g->code) {
        answer(false, false, what, g->error, "");
        return;
    }
    describe(g, found, sizeof found);
    bool held = g->total_bytes - g->free_bytes > g->total_bytes / HELD_SHARE;
    answer(!held, false, what, found,
           "others hold the rest of its memory: see with nvidia-smi who");
}

static void ask_pairs(const struct lg_run_gpus *g)
{
    char what[64];
    for (int i = 0; i < g->n; i++)
        for (int k = i + 1; k < g->n; k++) {
            const struct lg_run_gpu *a = &g->gpu[i], *b = &g->gpu[k];
            if (a->code || b->code || (a->peers >> b->number & b->peers >> a->number & 1)) continue;
            snprintf(what, sizeof what, "cuda:%d and cuda:%d", a->number, b->number);
            answer(false, false, what, "do not reach each other's memory",
                   "a run on both hands everything over through host memory (parallel.exchange), "
                   "which is "
                   "slower: nvidia-smi topo -p2p r shows GPUs of one NVLink or PCIe group");
        }
}

static void ask_gpus(void)
{
    struct lg_run_gpus g;
    if (lg_run_gpus_ask(NULL, 0, &g) < 0) {
        answer(false, false, "GPUs", lg_err_message(), "");
        lg_err_clear();
        return;
    }
    for (int i = 0; i < g.n; i++) ask_gpu(&g.gpu[i]);
    ask_pairs(&g);
    const char *cudnn = "";
    for (int i = 0; i < g.n; i++)
        if (!g.gpu[i].code) cudnn = g.gpu[i].cudnn;
    answer(cudnn[0], false, "cuDNN", cudnn[0] ? cudnn : "missing",
           "attention and convolutions run on slower kernels: install it, or name libcudnn.so.9 "
           "in $LG_CUDNN");
}

static void ask_backends(void)
{
    static const struct {
        const char *name;
        const char *advice;
    } backend[] = {
        {"host", "for device = \"host\": run `make deps` and `make`: libdnnl and the host backend"},
        {"cuda",
         "for device = \"cuda\": `make cuda` where nvcc is, and CUDA's libcublasLt beside it"},
    };
    char dir[LG_PATH_BYTES], path[LG_PATH_BYTES], why[512];
    const char *other = getenv("LG_BACKEND_DIR");
    bool any = false;
    if (lg_program_dir(dir) < 0) return;
    for (size_t i = 0; i < LG_ARRAY_LEN(backend); i++) {
        char what[64];
        snprintf(what, sizeof what, "backend %s", backend[i].name);
        if (lg_path(path, "%s%s/liblg-%s.so", other && *other ? other : dir,
                    other && *other ? "" : "/../lib", backend[i].name) < 0)
            continue;
        bool well = backend_loads(path, why, sizeof why);
        answer(well, false, what, well ? path : why, backend[i].advice);
        any |= well;
        if (well && !strcmp(backend[i].name, "cuda")) ask_gpus();
    }
    if (!any) answer(false, true, "a backend", "none can be loaded", "make one of them load");
}

static void ask_room(void)
{
    char text[128];
    struct sysinfo info;
    struct statvfs disk;
    if (sysinfo(&info) == 0) {
        double total = (double)info.totalram * info.mem_unit / GIB;
        snprintf(text, sizeof text, "%.1f GiB, %ld processors", total,
                 sysconf(_SC_NPROCESSORS_ONLN));
        answer(total >= 2, false, "memory", text, "`lgsup check FILE` prints what a run needs");
    }
    if (statvfs(".", &disk) == 0) {
        double left = (double)disk.f_bavail * (double)disk.f_frsize / GIB;
        snprintf(text, sizeof text, "%.1f GiB free here", left);
        answer(left >= 1, false, "disk", text, "checkpoints and logs need room in job.dir");
    }
}

static void ask_limits(void)
{
    char text[128];
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)files.rlim_max);
        answer(files.rlim_max >= LG_OPEN_FILES_MIN, true, "open files (ulimit -Hn)", text,
               "raise the hard limit to 4096 (/etc/security/limits.conf, LimitNOFILE= of the unit, "
               "--ulimit of the container)");
    }
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    bool usable = xdg && *xdg && access(xdg, W_OK | X_OK) == 0 && strlen(xdg) < 56;
    bool tmp = access("/tmp", W_OK | X_OK) == 0;
    answer(usable || tmp, true, "directory for sockets",
           usable ? xdg
           : tmp  ? "/tmp"
                  : "none",
           "set XDG_RUNTIME_DIR to a short path that you may write");
}

int lg_doctor(int *ret_exit)
{
    g_missing = 0;
    ask_kernel();
    ask_programs();
    ask_backends();
    ask_room();
    ask_limits();
    printf("%s\n", g_missing ? "something that is needed is missing" : "all well");
    *ret_exit = g_missing ? -LG_ERR_NOTFOUND : 0;
    return 0;
}
