/* A data set of pictures, or clips, with captions, addressed by number: what sample n of a run is.
 *
 * Where it may lie:
 * - WebDataset shards: one .tar, a folder of .tar files, a pattern (`*`, `?`, `[..]`, `{a,b}`,
 *   `{000..127}`) or a comma-separated list of these. Members of a sample stand next to each other
 *   and share the name up to the first dot of the file name, the key.
 * - A plain folder of pictures, with subfolders: the key is the path without its last extension.
 * Symbolic links in a folder, of pictures or of shards, count as long as they lead to places inside
 * it. Those that lead out of it are left out, and said in the log; a name that data.path itself gives
 * or that a pattern finds may lead anywhere.
 * Members: .png .jpg .jpeg .webp (the picture), with options.clips .mp4 .m4v .mov .webm .mkv .gif (the clip, which goes
 * before a picture), .latent.safetensors (an encoded picture: tensors
 * latent_mean and latent_logvar, (C, h, w), of clips (C, f, h, w)), .txt (one caption), .json ({"caption": "..."},
 * {"captions": [...]}, a list of strings or one string; it wins over .txt), .cls (class number in
 * decimal). In a plain folder a picture with neither .txt nor .json has the caption of its line of metadata.jsonl, if there
 * is one: {"file_name": "a.png", "text": "..."}, or "caption" or "captions" as above, or of a metadata.csv (source_lines.h). Which text of an item's captions a sample gets: caption.h. Others are ignored, as are names that begin with a dot or "__".
 *
 * Items are numbered by shard name, then position in the shard (folders: by path), byte order, so
 * the numbering depends on nothing but the data. A shard that is cut short is LG_ERR_CORRUPT at
 * open and says at which byte, unless allow_truncated is set: then its complete samples are used,
 * the rest is reported in the log. An empty data set is LG_ERR_CONFIG.
 *
 * The index takes about 50 bytes and the key's length per sample. At most LG_SOURCE_FDS_MAX files
 * are open at a time. A source is used by one thread. */
#pragma once
#include "base/check.h"
#include "base/fs.h"
#include "config/config.h"
#include "stages/io/caption.h"
#include "stages/io/clip_read.h"
#include "stages/io/mixture.h"
#include "stages/io/order.h"
#include "stages/io/picture.h"

enum {
    LG_SOURCE_FDS_MAX = 64,
    LG_SOURCE_CAPTIONS_MAX = 256, /* per sample */
    LG_NAME_SHOWN_BYTES = 128,
    LG_SOURCE_TEXT_BYTES_MAX = 1 << 20 /* of a .txt, .json or .cls member */
};
#define LG_SOURCE_MEMBER_BYTES_MAX                                                                 \
    (256u << 20) /* a larger picture or latent makes its sample void; clips: clip_read.h */

typedef struct lg_source lg_source;

struct lg_source_options {
    bool allow_truncated; /* use the complete samples of shards that are cut short */
    bool need_caption; /* a sample without a caption is void; no caption anywhere: LG_ERR_CONFIG */
    bool need_label;   /* likewise for .cls */
    bool clips;        /* look for clips, too; without it their files are none of the data set's */
};
/* What of plain folders is no item, for people. Names are the first of their kind by byte order, relative to their folder; ""
 * where there is none. */
struct lg_left_out {
    uint64_t other; /* files whose endings say nothing here */
    uint64_t same;  /* pictures and clips beside one of the same name that goes before them */
    uint64_t alone; /* texts and labels without a picture */
    char first_other[LG_NAME_SHOWN_BYTES], first_same[LG_NAME_SHOWN_BYTES],
        first_alone[LG_NAME_SHOWN_BYTES];
};
/* Indexes `path`. NULL options are all false. Blocks for one pass over the headers. */
int lg_source_open(const char *path, const struct lg_source_options *options, lg_source **ret);
/* The same of several paths, whose items follow one another: one data set, with keys "0:shard.tar/key", the number of the
 * path in front. What a config names, data.path or its data.source: lg_source_open_data. */
struct lg_source_spec {
    const char *path;
    double weight;    /* 0: none; see mixture.h */
    uint64_t repeats; /* >= 1 */
};
int lg_source_open_all(const struct lg_source_spec *spec, int n,
                       const struct lg_source_options *options, lg_source **ret);
int lg_source_open_data(const lg_config *c, const struct lg_source_options *options,
                        lg_source **ret);
/* The paths, and what of the samples comes from each. With buckets: of the items, each as often as it is repeated. */
struct lg_source_part {
    uint64_t first, count; /* items */
    uint64_t repeats;
    double share;
};
int lg_source_parts(const lg_source *s); /* how many */
struct lg_source_part lg_source_part(const lg_source *s, int i);
int lg_source_part_of(const lg_source *s, uint64_t item);
const struct lg_mixture *lg_source_mixture(const lg_source *s);
void lg_source_close(lg_source **s);
uint64_t lg_source_count(const lg_source *s); /* items, >= 1 */
const struct lg_left_out *lg_source_left_out(const lg_source *s);
/* Fingerprint of shard names, keys, member kinds and sizes; not of the folder they lie in. Never 0. */
uint64_t lg_source_hash(const lg_source *s);
/* For people, when a data set has changed: which shard, or which stretch of a folder, has which part in the
 * fingerprint. Publishes that at path, unless a list of this data set is there already. hash: by which the run knows it,
 * the fingerprint or with buckets lg_order_hash. */
int lg_source_parts_save(const lg_source *s, uint64_t hash, const char *path);
/* Says where this data set differs from the one known by `hash` whose list is at path: "shard
 * x-003.tar is gone"; "" when that is not known. */
void lg_source_parts_compare(const lg_source *s, const char *path, uint64_t hash, char *ret,
                             size_t bytes);
/* Some item carries a latent: then samples are latents, and items without one are void. */
bool lg_source_has_latents(const lg_source *s);
/* Some item is a clip by its file's name. */
bool lg_source_has_clips(const lg_source *s);

/* An item's key, "shard.tar/key" or "sub/key". */
void lg_source_key(const lg_source *s, uint64_t item, char ret[LG_PATH_BYTES]);
/* The size of an item's picture, from its first bytes: see picture.h; of a clip also its frames and duration, from all of its
 * packets: clip_read.h. LG_ERR_VOID: it has none whose size can be told; LG_ERR_IO as lg_source_read. */
int lg_source_size(lg_source *s, uint64_t item, struct lg_item_size *ret);
/* Those of all items, (count); the caller frees. They are read from the file `cache` if it holds them for this data
 * set (hash and number of items), whole; else from the items, and the file is published; NULL: there is none. A file that
 * cannot be written is a line in the log. Blocks for one look at the beginning of each picture, one pass over each clip. */
int lg_source_sizes(lg_source *s, const char *cache, struct lg_item_size **ret);

/* One item as stored. Everything points into memory of the item, valid until the next read into it.
 * Zero it before the first use. */
typedef struct lg_item {
    const char *key;                 /* "shard.tar/key", folders: "sub/key" */
    uint64_t key_hash;               /* XXH3 of key */
    const uint8_t *picture, *latent; /* file contents, NULL when the item has none */
    size_t picture_bytes, latent_bytes;
    const struct lg_clip_input *clip; /* what is read as it is needed; NULL when it has none */
    int n_captions;
    const char *caption[LG_SOURCE_CAPTIONS_MAX]; /* UTF-8 as found, white space trimmed */
    int64_t label;                               /* -1 when there is none */
    /* private */
    char *data;
    size_t capacity;
    struct lg_item_clip {
        struct lg_clip_input input;
        struct lg_source *source;
        size_t shard;
        const struct lg_index_member *member;
        int fd; /* of a file in a folder, + 1; 0: it is not open */
        struct lg_clip_memory memory;
    } film;
} lg_item;
/* LG_ERR_VOID: the item can never be used (no picture, malformed .json); LG_ERR_IO: reading failed
 * and may be tried again. key and key_hash are set in both cases. */
int lg_source_read(lg_source *s, uint64_t item, lg_item *ret);
void lg_item_free(lg_item *item);

/* How a run makes samples of items. Sample n is the item at place (n - first) % count of epoch
 * e = epoch + (n - first) / count, which is permutation(seed, e)[place]; every other choice is a function of
 * (seed, purpose, n). Of several sources mixture.h says which item a sample is. With buckets order.h does, and in which shape; some
 * are absent; an item that is repeated stands so often in its list. */
struct lg_sample_shape {
    int frames;        /* 1: a picture */
    int height, width; /* pixels */
};
struct lg_sample_rule {
    uint64_t seed;
    uint64_t first, epoch; /* of the part of the run (config/data_set.h): 0 and 0 in its first */
    struct lg_sample_shape shape;
    struct lg_clip_rate rate;
    bool latents_have_frames;         /* a data set's latents are (C, f, h, w), not (C, h, w) */
    const lg_order *order;            /* NULL: no buckets; else the shape is that of its bucket */
    const struct lg_buckets *buckets; /* the order's */
    bool random_crop;                 /* else the centre; only along the longer side */
    bool random_flip;                 /* mirrored in half of the samples */
    struct lg_caption_rule caption;
    double dropout;  /* probability that the caption becomes "" and the label num_classes */
    int num_classes; /* labels must be below; 0: labels are not looked at */
    bool no_shuffle; /* the item at that place, in every epoch */
};

/* Zero it before the first use. */
typedef struct lg_sample {
    uint64_t n, item;
    int bucket;      /* 0 without buckets */
    bool is_absent;  /* key_hash is 0 and nothing else set */
    const char *key; /* valid until the next sample; set even when the sample is void */
    uint64_t key_hash;
    bool dropped;
    const char *caption;                /* "" when there is none or it was dropped */
    int64_t label;                      /* num_classes when dropped; -1 without labels */
    bool is_latent;                     /* no pixels: crop and flip do not apply */
    float *latent_mean, *latent_logvar; /* (C, f, h, w), owned */
    int latent_dim[4];
    int stored_height, stored_width; /* of the picture, or a frame, in its file; 0 of a latent */
    int crop_top, crop_left;         /* lg_fit_corner; 0 of a latent */
    /* private */
    lg_item stored;
    struct lg_sample_work *work;
} lg_sample;
/* The order of a run with buckets: spec with count and size (of items) for all that stand in an epoch. */
int lg_source_order(const lg_source *s, const struct lg_order_spec *spec, lg_order **ret);
/* Which item sample n is, and its bucket (0 without buckets). */
struct lg_order_place lg_source_place(const lg_source *s, const struct lg_sample_rule *rule,
                                      uint64_t n);
/* Makes sample n; pixels (3, F, H, W) of the rule's shape, or its bucket's, is filled unless it is absent or the item carries latents.
 * LG_ERR_VOID, LG_ERR_IO as lg_source_read; the text says which file and why. A clip where one frame is wanted gives one. */
int lg_source_sample(lg_source *s, const struct lg_sample_rule *rule, uint64_t n, uint8_t *pixels,
                     lg_sample *ret);
void lg_sample_free(lg_sample *s);
