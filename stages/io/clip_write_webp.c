/* Animated WebP, lossless. Each frame is a whole picture: a file has as many frames as the clip, also where two are equal, which
 * libwebp's own encoder of animations makes one of. */
#include "stages/io/clip_write_private.h"
#include <math.h>
#include <webp/encode.h>
#include <webp/mux.h>

static int encode_frame(const struct lg_clip *c, int f, WebPMemoryWriter *out)
{
    WebPConfig config;
    WebPPicture p;
    const size_t bytes = (size_t)c->width * (size_t)c->height * 3;
    if (!WebPConfigInit(&config) || !WebPConfigLosslessPreset(&config, 6) || !WebPPictureInit(&p))
        return LG_FAIL(LG_ERR_FAILED, "libwebp is another version");
    p.use_argb = 1;
    p.width = c->width;
    p.height = c->height;
    p.writer = WebPMemoryWrite;
    p.custom_ptr = out;
    const bool well = WebPPictureImportRGB(&p, c->rgb + bytes * (size_t)f, c->width * 3) &&
                      WebPEncode(&config, &p);
    const int reason = p.error_code;
    WebPPictureFree(&p);
    if (well) return 0;
    return LG_FAIL(
        reason == VP8_ENC_ERROR_OUT_OF_MEMORY || reason == VP8_ENC_ERROR_BITSTREAM_OUT_OF_MEMORY
            ? LG_ERR_NOSPACE
            : LG_ERR_FAILED,
        "frame %d of %d x %d pixels as WebP: error %d of libwebp", f, c->height, c->width, reason);
}

static int mux_try(WebPMuxError e, const char *what)
{
    if (e == WEBP_MUX_OK) return 0;
    return LG_FAIL(e == WEBP_MUX_MEMORY_ERROR ? LG_ERR_NOSPACE : LG_ERR_FAILED,
                   "an animated WebP, %s: error %d of libwebpmux", what, e);
}

/* Frame f lasts until (f + 1) / fps, in thousandths of a second. */
static int add_frame(WebPMux *mux, const struct lg_clip *c, int f)
{
    WebPMemoryWriter out;
    WebPMemoryWriterInit(&out);
    int rc = encode_frame(c, f, &out);
    WebPMuxFrameInfo info = {
        .bitstream = {.bytes = out.mem, .size = out.size},
        .duration = (int)(lround(1000.0 * (f + 1) / c->fps) - lround(1000.0 * f / c->fps)),
        .id = WEBP_CHUNK_ANMF,
        .dispose_method = WEBP_MUX_DISPOSE_NONE,
        .blend_method = WEBP_MUX_NO_BLEND};
    if (rc == 0) rc = mux_try(WebPMuxPushFrame(mux, &info, 1), "a frame");
    WebPMemoryWriterClear(&out);
    return rc;
}

static int assemble(WebPMux *mux, const struct lg_clip *c, WebPData *ret)
{
    const WebPMuxAnimParams params = {.bgcolor = 0xffffffff, .loop_count = 0 /* for ever */};
    for (int f = 0; f < c->frames; f++) LG_TRY(add_frame(mux, c, f));
    LG_TRY(mux_try(WebPMuxSetAnimationParams(mux, &params), "its head"));
    LG_TRY(mux_try(WebPMuxAssemble(mux, ret), "the file"));
    return 0;
}

int lg_clip_write_webp(const struct lg_clip *c, struct lg_clip_bytes *out)
{
    WebPData data = {0};
    WebPMux *mux = WebPMuxNew();
    if (!mux) return LG_FAIL(LG_ERR_NOSPACE, "no memory for an animated WebP");
    int rc = assemble(mux, c, &data);
    if (rc == 0) rc = lg_clip_put(out, data.bytes, data.size);
    WebPMuxDelete(mux);
    WebPDataClear(&data);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}
