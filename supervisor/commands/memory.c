/* Adding up memory; see memory.h.
 *
 * Invariant: no sum overflows: a number is at most BYTES_MAX, and of every role at most ENTRIES_MAX are
 * taken, once. */
#include "supervisor/commands/memory.h"
#include "supervisor/run/child.h"
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRIES_MAX = 1024 };
#define BYTES_MAX ((uint64_t)1 << 49) /* 512 TiB: more than any buffer */
static_assert(LG_ROLE_COUNT * ENTRIES_MAX <= (1 << 14), "2^49 * 2^14 < 2^64");

void lg_memory_free(struct lg_memory *m)
{
    free(m->region);
    *m = (struct lg_memory){0};
}

/* ---- reading ---- */

static int find_device(struct lg_memory *m, const char *name, int *ret)
{
    int d = 0;
    while (d < m->n_devices && strcmp(m->device[d].name, name) != 0) d++;
    if (d == m->n_devices) {
        if (strlen(name) >= LG_DEVICE_TEXT_BYTES || !name[0])
            return LG_FAIL(LG_ERR_CORRUPT, "\"%.40s\" is no device", name);
        if (d == LG_MEMORY_DEVICES_MAX)
            return LG_FAIL(LG_ERR_CORRUPT, "more than %d devices", LG_MEMORY_DEVICES_MAX);
        m->device[m->n_devices++] = (struct lg_memory_device){0};
        strcpy(m->device[d].name, name);
    }
    *ret = d;
    return 0;
}

static bool is_gpu(const struct lg_memory_device *d)
{
    return strcmp(d->name, "host") != 0;
}

static int get_whole(const cJSON *entry, const char *key, uint64_t max, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(entry, key);
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0 && v->valuedouble <= (double)max) ||
        v->valuedouble != (double)(uint64_t)v->valuedouble)
        return LG_FAIL(LG_ERR_CORRUPT, "\"%s\" is missing, or no whole number from 0 to %" PRIu64,
                       key, max);
    *ret = (uint64_t)v->valuedouble;
    return 0;
}

static int get_text(const cJSON *entry, const char *key, const char **ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(entry, key);
    if (!cJSON_IsString(v)) return LG_FAIL(LG_ERR_CORRUPT, "\"%s\" is missing or no text", key);
    *ret = v->valuestring;
    return 0;
}

static int push_region(struct lg_memory *m, const struct lg_memory_region *r)
{
    if (m->n_regions == m->regions_cap) {
        int cap = m->regions_cap ? 2 * m->regions_cap : 64;
        void *grown = reallocarray(m->region, (size_t)cap, sizeof *m->region);
        if (!grown) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a list of %d regions", cap);
        m->region = grown;
        m->regions_cap = cap;
    }
    m->region[m->n_regions++] = *r;
    m->device[r->device].region_bytes += r->bytes;
    return 0;
}

static int add_region(struct lg_memory *m, const cJSON *entry)
{
    const char *name, *device;
    struct lg_memory_region r = {0};
    LG_TRY(get_text(entry, "name", &name));
    LG_TRY(get_text(entry, "device", &device));
    LG_TRY(get_whole(entry, "bytes", BYTES_MAX, &r.bytes));
    LG_TRY(find_device(m, device, &r.device));
    if (strlen(name) >= sizeof r.name || !name[0])
        return LG_FAIL(LG_ERR_CORRUPT, "\"%.80s\" is no region's name", name);
    strcpy(r.name, name);
    if (is_gpu(&m->device[r.device]))
        r.bytes = (r.bytes + LG_CUDA_PIECE_BYTES - 1) / LG_CUDA_PIECE_BYTES * LG_CUDA_PIECE_BYTES;
    for (int i = 0; i < m->n_regions; i++) {
        const struct lg_memory_region *had = &m->region[i];
        if (strcmp(had->name, name) != 0) continue;
        if (had->bytes == r.bytes && had->device == r.device) return 0;
        return LG_FAIL(LG_ERR_MISMATCH,
                       "region %s has %" PRIu64 " bytes on %s, but another role says %" PRIu64
                       " on %s: the programs are of different builds",
                       name, r.bytes, device, had->bytes, m->device[had->device].name);
    }
    LG_TRY(push_region(m, &r));
    return 0;
}

static int add_private(struct lg_memory *m, lg_role role, const cJSON *entry)
{
    const cJSON *note = cJSON_GetObjectItemCaseSensitive(entry, "note");
    const char *device;
    uint64_t bytes, instances, activations = 0;
    int d;
    LG_TRY(get_text(entry, "device", &device));
    LG_TRY(get_whole(entry, "bytes", BYTES_MAX, &bytes));
    LG_TRY(get_whole(entry, "instances", LG_INSTANCES_MAX, &instances));
    if (cJSON_HasObjectItem(entry, "activations"))
        LG_TRY(get_whole(entry, "activations", BYTES_MAX, &activations));
    LG_TRY(find_device(m, device, &d));
    if (cJSON_IsString(note))
        snprintf(m->note[role], sizeof m->note[role], "%s", note->valuestring);
    m->device[d].private_bytes[role] += bytes;
    m->device[d].activations += activations;
    if (activations) m->device[d].ranks += instances;
    if (is_gpu(&m->device[d]))
        m->device[d].contexts += instances;
    else if (instances > 0)
        m->process_bytes[role] = LG_MAX(m->process_bytes[role], bytes / instances);
    return 0;
}

static int add_all(struct lg_memory *m, lg_role role, const cJSON *json)
{
    const cJSON *regions = cJSON_GetObjectItemCaseSensitive(json, "regions");
    const cJSON *own = cJSON_GetObjectItemCaseSensitive(json, "private"), *entry;
    LG_ASSERT(!m->asked[role]);
    m->asked[role] = true;
    if (!cJSON_IsArray(regions) || !cJSON_IsArray(own))
        return LG_FAIL(LG_ERR_CORRUPT, "no JSON with the lists \"regions\" and \"private\"");
    if (cJSON_GetArraySize(regions) + cJSON_GetArraySize(own) > ENTRIES_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "more than %d entries", ENTRIES_MAX);
    cJSON_ArrayForEach(entry, regions) LG_TRY(add_region(m, entry));
    cJSON_ArrayForEach(entry, own) LG_TRY(add_private(m, role, entry));
    return 0;
}

int lg_memory_add(struct lg_memory *m, lg_role r, const char *output)
{
    cJSON *json = cJSON_Parse(lg_child_json(output));
    int rc = add_all(m, r, json);
    cJSON_Delete(json);
    if (rc < 0) {
        char why[512];
        snprintf(why, sizeof why, "%s", lg_err_message());
        return LG_FAIL(rc, "%s --plan: %s", lg_role_program(r), why);
    }
    return 0;
}

int lg_memory_room(struct lg_memory *m, const struct lg_memory_room *room)
{
    int d;
    LG_TRY(find_device(m, room->device, &d));
    snprintf(m->device[d].product, sizeof m->device[d].product, "%s", room->product);
    m->device[d].total_bytes = room->total_bytes;
    m->device[d].free_bytes = room->free_bytes;
    snprintf(m->device[d].group, sizeof m->device[d].group, "%s", room->group ? room->group : "");
    return 0;
}

void lg_memory_limit(struct lg_memory *m, lg_role r, const char *group, uint64_t bytes)
{
    struct lg_memory_limit *l = &m->process_limit[r];
    if (l->group[0] && l->bytes <= bytes) return;
    l->bytes = bytes;
    snprintf(l->group, sizeof l->group, "%s", group);
}

/* ---- sums ---- */

uint64_t lg_memory_private(const struct lg_memory_device *d)
{
    uint64_t sum = 0;
    for (int r = 0; r < LG_ROLE_COUNT; r++) sum += d->private_bytes[r];
    return sum;
}

uint64_t lg_memory_contexts(const struct lg_memory_device *d)
{
    return d->contexts * LG_CUDA_CONTEXT_BYTES;
}

uint64_t lg_memory_need(const struct lg_memory_device *d)
{
    return d->region_bytes + lg_memory_private(d) + lg_memory_contexts(d);
}

/* ---- does it fit ---- */

static int fail_host(const struct lg_memory_device *d)
{
    char need[32], total[32];
    lg_bytes_text(lg_memory_need(d), need);
    lg_bytes_text(d->total_bytes, total);
    if (d->group[0])
        return LG_FAIL(LG_ERR_NOSPACE,
                       "the run needs %s of the host's memory, and its control group %s may have "
                       "%s: raise that limit (MemoryMax= of a systemd unit or slice, the memory of "
                       "a container), or lower window.batches, trainer.micro_batch_size or the "
                       "number of instances",
                       need, d->group, total);
    return LG_FAIL(LG_ERR_NOSPACE,
                   "the run needs %s of the host's memory, this machine has %s: lower "
                   "window.batches, trainer.micro_batch_size or the number of instances",
                   need, total);
}

static int fail_process(const struct lg_memory *m, lg_role r)
{
    char need[32], limit[32];
    return LG_FAIL(LG_ERR_NOSPACE,
                   "a process of %s needs %s of memory for itself, and its control group %s may "
                   "have %s: raise that limit (MemoryMax=)",
                   lg_role_name(r), lg_bytes_text(m->process_bytes[r], need),
                   m->process_limit[r].group, lg_bytes_text(m->process_limit[r].bytes, limit));
}

static int fail_gpu(const struct lg_memory_device *d, const char *tip)
{
    char need[32], total[32], available[32], held[32];
    lg_bytes_text(lg_memory_need(d), need);
    lg_bytes_text(d->total_bytes, total);
    lg_bytes_text(d->free_bytes, available);
    if (lg_memory_need(d) > d->total_bytes)
        return LG_FAIL(LG_ERR_NOSPACE,
                       "the run needs %s of %s (%s), which has %s: %s%slower "
                       "trainer.micro_batch_size, vae.slice, vae.chunk, text.chunk or "
                       "window.batches, or move roles to other GPUs with trainer.gpus, vae.gpus "
                       "or text.gpus",
                       need, d->name, d->product, total, tip, *tip ? ", or " : "");
    return LG_FAIL(LG_ERR_NOSPACE,
                   "the run needs %s of %s (%s), where %s of %s are free: others hold %s: see with "
                   "nvidia-smi who, end them, or take another GPU with trainer.gpus, vae.gpus or "
                   "text.gpus",
                   need, d->name, d->product, available, total,
                   lg_bytes_text(d->total_bytes - d->free_bytes, held));
}

const struct lg_memory_device *lg_memory_small_gpu(const struct lg_memory *m)
{
    for (int i = 0; i < m->n_devices; i++) {
        const struct lg_memory_device *d = &m->device[i];
        if (is_gpu(d) && d->total_bytes && lg_memory_need(d) > d->total_bytes) return d;
    }
    return NULL;
}

int lg_memory_fits(const struct lg_memory *m, const char *tip)
{
    for (int i = 0; i < m->n_devices; i++) {
        const struct lg_memory_device *d = &m->device[i];
        if (d->total_bytes == 0) continue;
        uint64_t room = is_gpu(d) ? LG_MIN(d->free_bytes, d->total_bytes) : d->total_bytes;
        if (lg_memory_need(d) > room) return is_gpu(d) ? fail_gpu(d, tip) : fail_host(d);
    }
    for (int r = 0; r < LG_ROLE_COUNT; r++)
        if (m->process_limit[r].group[0] && m->process_bytes[r] > m->process_limit[r].bytes)
            return fail_process(m, (lg_role)r);
    return 0;
}

/* ---- printing ---- */

static void print_line(FILE *out, const char *what, uint64_t bytes)
{
    char size[32];
    fprintf(out, "  %-22s %12s\n", what, lg_bytes_text(bytes, size));
}

/* Line by line. */
static void print_note(FILE *out, const char *note)
{
    for (size_t n; *note; note += n + (note[n] == '\n')) {
        n = strcspn(note, "\n");
        fprintf(out, "    %.*s\n", (int)n, note);
    }
}

static void print_device(const struct lg_memory *m, const struct lg_memory_device *d, FILE *out)
{
    char what[64], size[32], available[32];
    fprintf(out, "\n%s%s%s\n", d->name, d->product[0] ? "  " : "", d->product);
    print_line(out, "regions", d->region_bytes);
    for (int r = 0; r < LG_ROLE_COUNT; r++) {
        if (!d->private_bytes[r]) continue;
        snprintf(what, sizeof what, "%s, private", lg_role_name((lg_role)r));
        print_line(out, what, d->private_bytes[r]);
        print_note(out, m->note[r]);
    }
    print_line(out, "together", d->region_bytes + lg_memory_private(d));
    if (is_gpu(d)) {
        snprintf(what, sizeof what, "%" PRIu64 " CUDA contexts", d->contexts);
        print_line(out, what, lg_memory_contexts(d));
        print_line(out, "with them", lg_memory_need(d));
    }
    if (d->total_bytes)
        fprintf(out, "  %-22s %12s of %s%s%s\n", "free now",
                lg_bytes_text(d->free_bytes, available), lg_bytes_text(d->total_bytes, size),
                d->group[0] ? ", the limit of the control group " : "", d->group);
}

void lg_memory_print(const struct lg_memory *m, FILE *out)
{
    char size[32];
    fprintf(out, "%-40s %-8s %12s\n", "region", "device", "bytes");
    for (int i = 0; i < m->n_regions; i++)
        fprintf(out, "%-40s %-8s %12s\n", m->region[i].name, m->device[m->region[i].device].name,
                lg_bytes_text(m->region[i].bytes, size));
    for (int i = 0; i < m->n_devices; i++) print_device(m, &m->device[i], out);
}
