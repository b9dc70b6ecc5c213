/* See op_trace.h. One mutex around everything: who traces does not measure. */
#include "kernels/op_trace.h"
#include "base/check.h"
#include "kernels/op_table.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct buffer {
    uintptr_t at;
    size_t bytes;
    uint64_t number;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static FILE *file; /* NULL: no trace */
static struct buffer *buffer;
static size_t n_buffers;
static uint64_t buffers_made;

static void open_file(void)
{
    const char *path = getenv("LG_TRACE_OPS");
    char name[4096];
    if (!path || !*path) return;
    snprintf(name, sizeof name, "%s.%d", path, (int)getpid());
    file = fopen(name, "we");
    if (!file) {
        fprintf(stderr, "LG_TRACE_OPS: cannot write %s: %s\n", name, strerror(errno));
        abort();
    }
}

static bool is_on(void)
{
    pthread_once(&once, open_file);
    return file != NULL;
}

void lg_trace_memory(const void *at, size_t bytes)
{
    if (!is_on()) return;
    pthread_mutex_lock(&mutex);
    buffer = realloc(buffer, (n_buffers + 1) * sizeof *buffer);
    LG_ASSERT(buffer);
    buffer[n_buffers++] = (struct buffer){(uintptr_t)at, bytes, buffers_made++};
    pthread_mutex_unlock(&mutex);
}

void lg_trace_forget(const void *at)
{
    if (!is_on()) return;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < n_buffers; i++)
        if (buffer[i].at == (uintptr_t)at) buffer[i--] = buffer[--n_buffers];
    pthread_mutex_unlock(&mutex);
}

/* ---- where a tensor lies ---- */

/* The file that is mapped at `at`: "/memfd:NAME (deleted)" gives NAME. False: none is. */
static bool find_mapped(uintptr_t at, char ret[64], uint64_t *ret_offset)
{
    char line[512];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && !found && fgets(line, sizeof line, maps)) {
        uintptr_t from, to;
        uint64_t offset;
        int path = 0;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %*s %*s %n", &from, &to,
                   &offset, &path) != 3 ||
            at < from || at >= to || line[path] != '/')
            continue;
        char *name = line + path;
        if (!strncmp(name, "/memfd:", 7)) name += 7;
        name[strcspn(name, " \n")] = 0;
        snprintf(ret, 64, "%.63s", name);
        *ret_offset = offset + (at - from);
        found = true;
    }
    if (maps) fclose(maps);
    return found;
}

static void print_place(const void *data)
{
    char name[64];
    uint64_t offset;
    uintptr_t at = (uintptr_t)data;
    for (size_t i = 0; i < n_buffers; i++) {
        if (at < buffer[i].at || at - buffer[i].at >= buffer[i].bytes) continue;
        fprintf(file, " memory.%" PRIu64 "+%zu", buffer[i].number, (size_t)(at - buffer[i].at));
        return;
    }
    if (find_mapped(at, name, &offset))
        fprintf(file, " %s+%" PRIu64, name, offset);
    else
        fprintf(file, " ?+%" PRIxPTR, at);
}

/* ---- a line ---- */

static void print_tensor(const struct lg_operand *o, const lg_tensor *t, int i)
{
    fprintf(file, " | %s", o->name);
    if (o->max) fprintf(file, "[%d]", i);
    if (t->rank == 0 || !t->data) {
        fprintf(file, " -");
        return;
    }
    fprintf(file, " %s ", lg_dtype_name(t->dtype));
    for (int d = 0; d < t->rank; d++) fprintf(file, "%s%" PRId64, d ? "," : "", t->dim[d]);
    if (lg_operand_has_rows(o)) fprintf(file, "/%" PRId64, lg_row_stride(t, o->row));
    print_place(t->data);
}

void lg_trace_op(lg_op_id id, const void *args)
{
    if (!is_on()) return;
    const struct lg_op_info *op = lg_op_info(id);
    pthread_mutex_lock(&mutex);
    fputs(op->name, file);
    lg_scalars_print(op, args, 17, file);
    for (int i = 0; i < op->n_operands; i++)
        for (int k = 0; k < lg_operand_count(&op->operand[i], args); k++)
            print_tensor(&op->operand[i], lg_operand_at(&op->operand[i], args, k), k);
    if (fputc('\n', file) == EOF || fflush(file) != 0) abort();
    pthread_mutex_unlock(&mutex);
}
