/* Pixel formats and colours; see planes.h. */
#include "stages/io/av/planes.h"
#include <libavutil/pixdesc.h>

/* What is not said is what players take it for: BT.709 where a frame is high or wide, else BT.601. */
static int find_colours(const AVFrame *f, bool is_rgb, lg_clip_colours *ret)
{
    *ret = is_rgb                                ? LG_CLIP_RGB
           : f->width >= 1280 || f->height > 576 ? LG_CLIP_BT709
                                                 : LG_CLIP_BT601;
    if (is_rgb) return 0;
    switch (f->colorspace) {
    case AVCOL_SPC_UNSPECIFIED:
    case AVCOL_SPC_RESERVED:
        return 0;
    case AVCOL_SPC_BT709:
        *ret = LG_CLIP_BT709;
        return 0;
    case AVCOL_SPC_BT470BG:
    case AVCOL_SPC_SMPTE170M:
        *ret = LG_CLIP_BT601;
        return 0;
    case AVCOL_SPC_BT2020_NCL:
        *ret = LG_CLIP_BT2020;
        return 0;
    case AVCOL_SPC_SMPTE240M:
        *ret = LG_CLIP_SMPTE240M;
        return 0;
    case AVCOL_SPC_FCC:
        *ret = LG_CLIP_FCC;
        return 0;
    default:
        return LG_FAIL(LG_ERR_VOID, "clip has the colour matrix %s, which is not read",
                       av_color_space_name(f->colorspace));
    }
}

/* Formats whose full range is in their name, and all of RGB. */
static bool is_full(const AVFrame *f, bool is_rgb)
{
    return is_rgb || f->color_range == AVCOL_RANGE_JPEG || f->format == AV_PIX_FMT_YUVJ420P ||
           f->format == AV_PIX_FMT_YUVJ422P || f->format == AV_PIX_FMT_YUVJ444P ||
           f->format == AV_PIX_FMT_YUVJ440P;
}

int lg_av_planes(const AVFrame *f, struct lg_clip_planes *ret)
{
    const AVPixFmtDescriptor *d = av_pix_fmt_desc_get((enum AVPixelFormat)f->format);
    const uint64_t strange = AV_PIX_FMT_FLAG_BE | AV_PIX_FMT_FLAG_PAL | AV_PIX_FMT_FLAG_BITSTREAM |
                             AV_PIX_FMT_FLAG_HWACCEL | AV_PIX_FMT_FLAG_BAYER |
                             AV_PIX_FMT_FLAG_FLOAT;
    const bool is_rgb = d && d->flags & AV_PIX_FMT_FLAG_RGB;
    if (!d || d->flags & strange || d->nb_components == 2)
        return LG_FAIL(LG_ERR_VOID, "clip has pixels of the kind %s, which is not read",
                       d ? d->name : "unknown");
    *ret = (struct lg_clip_planes){.width = f->width,
                                   .height = f->height,
                                   .is_full = is_full(f, is_rgb),
                                   .n = d->nb_components};
    LG_TRY(find_colours(f, is_rgb, &ret->colours));
    for (int c = 0; c < ret->n; c++) {
        const AVComponentDescriptor *k = &d->comp[c];
        const bool is_chroma = !is_rgb && (c == 1 || c == 2);
        if (k->depth < 8 || k->depth > 16 || k->depth + k->shift > 16)
            return LG_FAIL(LG_ERR_VOID, "clip has pixels of the kind %s, which is not read",
                           d->name);
        ret->of[c] = (struct lg_clip_component){
            .data = f->data[k->plane] + k->offset,
            .stride = f->linesize[k->plane],
            .step = k->step,
            .depth = k->depth,
            .shift = k->shift,
            .log2_x = is_chroma ? d->log2_chroma_w : 0,
            .log2_y = is_chroma ? d->log2_chroma_h : 0,
        };
    }
    return 0;
}
