/* Event files of a run; see tensorboard.h.
 *
 * Files are called events.out.tfevents.<number>.lg and read by TensorBoard in this order. One grows;
 * a new one is begun only where something has been cut off: it starts by declaring what follows void,
 * so that a TensorBoard that has already shown it forgets it, too.
 *
 * A look at a time: at most ROWS_MAX steps, one picture and the histograms of one step, a write each.
 * When it fails the file is cut back to whole records. Pictures and histograms come late (they are made
 * while training goes on), each once, in the order of their steps. */
#include "supervisor/views/tensorboard.h"
#include "base/clock.h"
#include "supervisor/views/histograms.h"
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    LOOK_MS = 1000,
    FILES_MS = 5000,
    ROWS_MAX = 512,
    ROW_BYTES_MAX = 1024,
    FILE_BYTES_MAX = 32 << 20, /* a larger picture or JSON is passed over */
    FILES_MAX = 1000000,
};

/* ---- what is there ---- */

static int file_path(const lg_tensorboard *t, int number, char ret[LG_PATH_BYTES])
{
    return lg_path(ret, "%s/tensorboard/events.out.tfevents.%010d.lg", t->run_dir, number);
}

/* Number of the last file, 0: none. */
static int last_number(const lg_tensorboard *t)
{
    char path[LG_PATH_BYTES];
    int last = 0, number;
    if (lg_path(path, "%s/tensorboard", t->run_dir) < 0) return 0;
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        if (sscanf(e->d_name, "events.out.tfevents.%10d.lg", &number) == 1)
            last = LG_MAX(last, LG_MIN(number, FILES_MAX));
    if (d) closedir(d);
    return last;
}

/* Walks over a file's records up to the first that is torn or of a step > committed. */
static uint64_t walk(lg_tensorboard *t, const uint8_t *data, size_t bytes, uint64_t committed)
{
    struct lg_tf_record r;
    size_t at = 0;
    for (; lg_tf_read(data + at, bytes - at, &r); at += r.bytes) {
        if (r.kind != LG_TF_OTHER && r.step > committed) break;
        if (r.kind == LG_TF_SCALARS) t->last_step = LG_MAX(t->last_step, r.step);
        if (r.kind == LG_TF_PICTURE) t->last_picture = LG_MAX(t->last_picture, r.step);
        if (r.kind == LG_TF_HISTOGRAMS) t->last_histogram = LG_MAX(t->last_histogram, r.step);
    }
    return at;
}

/* Opens a file as the one that grows; *ret_cut: something at its end had to go. */
static int open_file(lg_tensorboard *t, int number, uint64_t committed, bool *ret_cut)
{
    struct stat st;
    LG_TRY(file_path(t, number, t->path));
    int fd = open(t->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || fstat(fd, &st) < 0) goto fail;
    t->bytes = 0;
    if (st.st_size > 0) {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) goto fail;
        t->bytes = walk(t, data, (size_t)st.st_size, committed);
        munmap(data, (size_t)st.st_size);
    }
    *ret_cut = t->bytes < (uint64_t)st.st_size;
    if (*ret_cut && ftruncate(fd, (off_t)t->bytes) < 0) goto fail;
    if (t->fd >= 0) close(t->fd);
    t->fd = fd;
    return 0;
fail:
    if (fd >= 0) close(fd);
    return LG_FAIL(lg_err_from_errno(errno), "%s: %s", t->path, strerror(errno));
}

/* ---- writing ---- */

static bool write_buffer(lg_tensorboard *t, const uint8_t *data, size_t bytes)
{
    if (pwrite(t->fd, data, bytes, (off_t)t->bytes) != (ssize_t)bytes) {
        int cut = ftruncate(t->fd, (off_t)t->bytes); /* or at the next start */
        (void)cut;
        return false;
    }
    t->bytes += bytes;
    return true;
}

static double wall_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* cut_from: 0, or the first step that was cut off. */
static bool begin_file(lg_tensorboard *t, uint64_t cut_from)
{
    struct lg_tf_buffer b = {.data = t->buffer, .cap = ROWS_MAX * ROW_BYTES_MAX};
    lg_tf_version(&b, wall_s());
    if (cut_from) lg_tf_start(&b, wall_s(), cut_from);
    LG_ASSERT(!b.full);
    return write_buffer(t, b.data, b.bytes);
}

static int open_files(lg_tensorboard *t, uint64_t committed)
{
    char path[LG_PATH_BYTES];
    bool cut = false;
    int last = last_number(t), number = 1;
    LG_TRY(lg_path(path, "%s/tensorboard", t->run_dir));
    LG_TRY(lg_mkdirs(path));
    for (; number <= LG_MAX(last, 1) && !cut; number++)
        LG_TRY(open_file(t, number, committed, &cut));
    if (!cut) return 0;
    for (int n = number; n <= last; n++) /* what came after the cut */
        if (file_path(t, n, path) == 0) unlink(path);
    LG_TRY(open_file(t, number, committed, &cut));
    if (!begin_file(t, t->last_step + 1))
        return LG_FAIL(lg_err_from_errno(errno), "%s: %s", t->path, strerror(errno));
    return 0;
}

int lg_tensorboard_open(const char *run_dir, uint64_t committed, lg_tensorboard *ret)
{
    *ret = (lg_tensorboard){.fd = -1, .metrics.fd = -1};
    LG_TRY(lg_path(ret->run_dir, "%s", run_dir));
    ret->buffer = malloc(ROWS_MAX * ROW_BYTES_MAX);
    if (!ret->buffer) return LG_FAIL(LG_ERR_NOSPACE, "no memory for event files");
    int rc = open_files(ret, committed);
    if (rc < 0) {
        lg_tensorboard_close(ret);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    return 0;
}

void lg_tensorboard_close(lg_tensorboard *t)
{
    if (!t->buffer) return;
    lg_metrics_close(&t->metrics);
    if (t->fd >= 0) close(t->fd);
    free(t->buffer);
    *t = (lg_tensorboard){.fd = -1, .metrics.fd = -1};
}

/* ---- steps ---- */

static void append_row(struct lg_tf_buffer *b, const struct lg_metric *m)
{
    struct lg_tf_scalar v[10];
    int n = 0;
    v[n++] = (struct lg_tf_scalar){"train/loss", m->loss};
    if (m->has_vb) {
        v[n++] = (struct lg_tf_scalar){"train/loss_mse", m->loss - m->loss_vb};
        v[n++] = (struct lg_tf_scalar){"train/loss_vb", m->loss_vb};
    }
    v[n++] = (struct lg_tf_scalar){"train/grad_norm", m->grad_norm};
    v[n++] = (struct lg_tf_scalar){"train/lr", m->lr};
    v[n++] = (struct lg_tf_scalar){"train/skipped", m->skipped};
    v[n++] = (struct lg_tf_scalar){"data/voids", m->voids};
    if (m->samples_per_s > 0)
        v[n++] = (struct lg_tf_scalar){"speed/samples_per_s", m->samples_per_s};
    v[n++] = (struct lg_tf_scalar){"speed/data_wait_s", m->data_wait_s};
    v[n++] = (struct lg_tf_scalar){"speed/checkpoint_wait_s", m->ckpt_wait_s};
    LG_ASSERT(n <= (int)LG_ARRAY_LEN(v));
    lg_tf_scalars(b, m->time_s > 0 ? m->time_s : wall_s(), m->step, v, n);
}

/* *ret_rows: how many steps were written; ROWS_MAX: there may be more. */
static bool write_rows(lg_tensorboard *t, uint64_t committed, int *ret_rows)
{
    struct lg_tf_buffer b = {.data = t->buffer, .cap = ROWS_MAX * ROW_BYTES_MAX};
    struct lg_metric m;
    uint64_t last = t->last_step;
    int n = 0;
    *ret_rows = 0;
    if (!t->metrics.buffer && lg_metrics_open(t->run_dir, last, &t->metrics) < 0) return true;
    while (n < ROWS_MAX && lg_metrics_next(&t->metrics, committed, &m)) {
        if (m.step <= last) continue;
        append_row(&b, &m);
        LG_ASSERT(!b.full);
        last = m.step;
        n++;
    }
    if (n && !write_buffer(t, b.data, b.bytes)) {
        lg_metrics_close(&t->metrics); /* begins again behind last_step */
        return false;
    }
    t->last_step = last;
    *ret_rows = n;
    return true;
}

/* ---- what is made of checkpoints ---- */

/* The least step in (past, committed] of which there is a file; 0: none. */
struct lookup {
    const char *folder;    /* "samples" */
    const char *ending[2]; /* ".png", ".gif" or NULL */
    uint64_t past, committed;
};
static uint64_t next_file(const lg_tensorboard *t, const struct lookup *l,
                          char ret_path[LG_PATH_BYTES])
{
    uint64_t least = 0;
    const char *ending = "";
    if (lg_path(ret_path, "%s/%s", t->run_dir, l->folder) < 0) return 0;
    DIR *d = opendir(ret_path);
    for (struct dirent *e; d && (e = readdir(d));) {
        char *end;
        if (strncmp(e->d_name, "step", 4) || !isdigit((unsigned char)e->d_name[4])) continue;
        uint64_t step = strtoull(e->d_name + 4, &end, 10);
        if (step <= l->past || step > l->committed || (least && step > least)) continue;
        for (size_t i = 0; i < LG_ARRAY_LEN(l->ending); i++)
            if (l->ending[i] && !strcmp(end, l->ending[i])) least = step, ending = l->ending[i];
    }
    if (d) closedir(d);
    if (lg_path(ret_path, "%s/%s/step%" PRIu64 "%s", t->run_dir, l->folder, least, ending) < 0)
        return 0;
    return least;
}

static uint32_t big_endian(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* The size that a PNG or a GIF says; false: neither. */
static bool size_of(const uint8_t *file, size_t bytes, struct lg_tf_image *image)
{
    if (bytes >= 24 && !memcmp(file, "\x89PNG\r\n\x1a\n", 8)) {
        image->width = big_endian(file + 16);
        image->height = big_endian(file + 20);
    } else if (bytes >= 10 && !memcmp(file, "GIF89a", 6)) {
        image->width = (uint32_t)file[6] | (uint32_t)file[7] << 8;
        image->height = (uint32_t)file[8] | (uint32_t)file[9] << 8;
    } else {
        return false;
    }
    return true;
}

/* What is neither a PNG nor a GIF is passed over. */
static bool write_picture(lg_tensorboard *t, uint64_t step, const char *file, size_t bytes)
{
    struct lg_tf_buffer b = {.cap = bytes + LG_TF_PICTURE_EXTRA};
    struct lg_tf_image image = {.tag = "samples", .file = (const uint8_t *)file, .bytes = bytes};
    if (!size_of(image.file, bytes, &image)) return true;
    b.data = malloc(b.cap);
    if (!b.data) return false;
    lg_tf_picture(&b, wall_s(), step, &image);
    LG_ASSERT(!b.full);
    bool well = write_buffer(t, b.data, b.bytes);
    free(b.data);
    return well;
}

/* What is no histogram is passed over. */
static bool write_json(lg_tensorboard *t, uint64_t step, const char *text, size_t bytes)
{
    struct lg_tf_buffer b;
    (void)bytes;
    if (lg_histograms_record(text, wall_s(), step, &b) < 0) return true;
    LG_ASSERT(!b.full);
    bool well = write_buffer(t, b.data, b.bytes);
    free(b.data);
    return well;
}

/* The next file of a kind, if there is one: *ret_more. */
static bool write_file(lg_tensorboard *t, uint64_t committed, bool picture, bool *ret_more)
{
    char path[LG_PATH_BYTES], *data = NULL;
    size_t bytes;
    uint64_t *last = picture ? &t->last_picture : &t->last_histogram;
    const struct lookup pictures = {"samples", {".png", ".gif"}, *last, committed},
                        histograms = {"histograms", {".json"}, *last, committed};
    uint64_t step = next_file(t, picture ? &pictures : &histograms, path);
    if (!step) return true;
    bool well = true;
    if (lg_read_file(path, FILE_BYTES_MAX, &data, &bytes) == 0)
        well = (picture ? write_picture : write_json)(t, step, data, bytes);
    lg_err_clear();
    free(data);
    if (well) *last = step;
    *ret_more = true;
    return well;
}

/* ---- looks ---- */

static bool write_some(lg_tensorboard *t, uint64_t committed, bool files, bool *ret_more)
{
    int rows = 0;
    *ret_more = false;
    if (t->bytes == 0 && !begin_file(t, 0)) return false;
    if (!write_rows(t, committed, &rows)) return false;
    *ret_more = rows == ROWS_MAX;
    if (!files) return true;
    return write_file(t, committed, true, ret_more) && write_file(t, committed, false, ret_more);
}

int lg_tensorboard_look(lg_tensorboard *t, uint64_t committed)
{
    int64_t now_ns = lg_now_ns();
    bool more, files = now_ns >= t->next_file_ns, was_failed = t->failed;
    if (!t->buffer || now_ns < t->next_ns) return 0;
    t->failed = !write_some(t, committed, files, &more);
    if (t->failed || !more) t->next_ns = now_ns + LOOK_MS * LG_MS_NS;
    if (files && !more) t->next_file_ns = now_ns + FILES_MS * LG_MS_NS;
    lg_err_clear();
    return t->failed && !was_failed;
}

void lg_tensorboard_flush(lg_tensorboard *t, uint64_t committed)
{
    bool more = t->buffer != NULL;
    while (more && write_some(t, committed, true, &more)) continue;
    lg_err_clear();
}
