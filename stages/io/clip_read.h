/* Clips: a run of frames out of a film. MP4 and QuickTime, Matroska and WebM, GIF, animated WebP to RGB.
 *
 * What is read: the first track of pictures; H.264, H.265, VP8, VP9, AV1, MPEG-4 part 2, FFV1, GIF, WebP. The kind of a file is
 * told by its first bytes, never by its name. Frames are turned by quarters and mirrored as the container says (telephones store
 * upright films lying); other angles are void. Sound, subtitles, and what the file says of pixel aspect, transfer and
 * primaries are ignored. Transparency is laid over white, but WebM's,
 * a film of its own beside the frames, is not read. Luma and chroma become RGB by integer arithmetic of our own
 * (clip_rgb.h), each chroma sample standing for all the pixels that it covers.
 *
 * **Frames and times.** A file's frames are counted and ordered by the times of its packets, which are read from the first to
 * the last before anything is decoded. What a container claims of its length, its number of frames or its rate is not
 * looked at. The film lasts as long as its frames would if the last one stood as long as the others do on average.
 * A clip begins with the last frame at or before a time that is drawn. With fps its frame j is the last that begins j / fps
 * later at most, or by what the container rounds times to (Matroska: 1 ms) behind that; without, frame first + stride j of the file.
 *
 * A film may begin with a key frame before which leading pictures are shown whose references were cut off: they are not counted.
 * H.264's key frames may be no IDR pictures (open groups): where decoding from one fails, it begins once more with an earlier one, of
 * whose pictures before the key frame damage is forgiven; at a film's beginning, where there is none, so is that of the
 * packets of a decoder's memory (clip_times.c).
 *
 * **What is void** (LG_ERR_VOID, with the reason): another kind of file or codec; a packet that is cut off, and whatever the
 * decoder reports as damaged between the key frame before the clip and its last frame; frames without times, or two
 * at one time; a rate below 1 or above 1000 frames a second; frames of another size than the container says, or one out of
 * bounds; fewer frames than the clip needs; and more work than the bounds below. They all count, none is a time, so
 * that every machine calls the same files void. The bits of a clip follow from the file's bytes and the choice alone: one
 * thread, decoders whose results their standards fix to the bit, or which have one inverse transform for all instruction sets.
 *
 * libav is a shared object of ours, liblg-av.so, opened with the first file that needs it (it and what it needs take 90 ms to
 * load); GIF needs it, WebP does not. Its demuxers see nothing but the file's bytes: no other file, no network. */
#pragma once
#include "base/check.h"
#include "stages/io/picture.h"

enum {
    LG_CLIP_READ_SIDE_MAX = 8192,       /* pixels of a frame */
    LG_CLIP_READ_PIXELS_MAX = 16 << 20, /* width * height; the decoder keeps up to 17 frames */
    LG_CLIP_READ_FRAMES_MAX = 1 << 20,  /* of a file: 10 hours at 29 a second */
    LG_CLIP_READ_BYTES_MAX = 1 << 30,   /* of a file */
    LG_CLIP_READ_DECODED_MAX = 1 << 14, /* frames decoded for one clip */
    LG_CLIP_READ_ALLOC_MAX = 512 << 20, /* bytes of one piece of memory of libav's */
    LG_CLIP_READ_RATE_MIN = 1,          /* frames a second */
    LG_CLIP_READ_RATE_MAX = 1000,
    LG_CLIP_READ_HEAD_BYTES = 32 /* for lg_clip_is */
};
/* Pixels decoded for one clip: 8192 frames of 1920 x 1080. */
#define LG_CLIP_READ_WORK_MAX (INT64_C(16) << 30)

/* Where a file's bytes are. */
struct lg_clip_input {
    /* `bytes` bytes from `at` on, all of which lie in the file. LG_ERR_IO is handed on. */
    int (*read)(void *arg, uint64_t at, void *dst, size_t bytes);
    void *arg;
    uint64_t bytes;
};
struct lg_clip_memory {
    const void *data;
    size_t bytes;
};
struct lg_clip_input lg_clip_memory(struct lg_clip_memory *m); /* which outlives it */

/* Is it a file of several frames, by its first bytes? A WebP is if it says that it is animated. */
bool lg_clip_is(const void *head, size_t bytes);

struct lg_clip_info {
    int width, height;    /* pixels, of the turned frame */
    uint32_t frames;      /* >= 1 */
    uint32_t duration_ms; /* rounded down; 0 of one frame */
};
/* Reads the whole file and decodes nothing, but of MPEG-4 in MP4 the first frame, which alone knows its size. */
int lg_clip_look(const struct lg_clip_input *in, struct lg_clip_info *ret);

/* Frames a second, or every so manyth frame of the file: data.fps and data.stride. */
struct lg_clip_rate {
    double fps; /* 0: the file's own frames, */
    int stride; /* of which each so manyth is taken; 0: as 1 */
};
/* Frames that the whole film has at this rate. */
uint32_t lg_clip_frames_at(const struct lg_clip_info *info, const struct lg_clip_rate *rate);

struct lg_clip_choice {
    int frames;
    struct lg_clip_rate rate;
    double start; /* [0, 1): which of the places where the clip may begin */
};
/* One frame at a time, in their order: it is frames [first, end) of the clip, of which each stands there once, none is left
 * out. An error ends the reading and is returned. */
typedef int (*lg_clip_on_frame)(void *arg, int first, int end, const lg_picture *frame);
int lg_clip_read(const struct lg_clip_input *in, const struct lg_clip_choice *c,
                 lg_clip_on_frame on_frame, void *arg, struct lg_clip_info *ret);
