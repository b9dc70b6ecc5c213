/* The display matrix of MP4, QuickTime and Matroska; see orientation.h. ISO/IEC 14496-12, 6.2.2: of a stored point (x, y)
 * it makes (a x + c y, b x + d y), y downwards; its scale and its offset are of no interest to us. */
#include "stages/io/av/orientation.h"
#include <stdlib.h>

enum { A = 0, B = 1, C = 3, D = 4, SIDES = 9 };

static const int32_t *find_matrix(const AVStream *s)
{
#if LIBAVFORMAT_VERSION_INT >= AV_VERSION_INT(60, 15, 100)
    const AVPacketSideData *d = av_packet_side_data_get(
        s->codecpar->coded_side_data, s->codecpar->nb_coded_side_data, AV_PKT_DATA_DISPLAYMATRIX);
    return d && d->size >= SIDES * sizeof(int32_t) ? (const int32_t *)d->data : NULL;
#else
    size_t bytes = 0;
    const uint8_t *d = av_stream_get_side_data(s, AV_PKT_DATA_DISPLAYMATRIX, &bytes);
    return d && bytes >= SIDES * sizeof(int32_t) ? (const int32_t *)(const void *)d : NULL;
#endif
}

/* Is `small` nothing beside `large`, up to the degree by which some cameras miss? */
static bool is_nothing(int64_t small, int64_t large)
{
    return llabs(small) * 57 <= llabs(large);
}

int lg_av_orientation(const AVStream *s, int *ret)
{
    /* [its rows run from the right or from below][its columns do], by the signs of what x and of what y becomes */
    static const int level[2][2] = {{1, 4}, {2, 3}}, turned[2][2] = {{5, 6}, {8, 7}};
    const int32_t *m = find_matrix(s);
    *ret = 1;
    if (!m || !(m[A] || m[B] || m[C] || m[D])) return 0;
    if (is_nothing(m[B], m[A]) && is_nothing(m[C], m[D]))
        *ret = level[m[A] < 0][m[D] < 0];
    else if (is_nothing(m[A], m[B]) && is_nothing(m[D], m[C]))
        *ret = turned[m[B] < 0][m[C] < 0];
    else
        return LG_FAIL(LG_ERR_VOID, "clip is to be turned by an angle that is no quarter turn");
    return 0;
}
