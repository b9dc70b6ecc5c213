/* Matrices of 8 bits: a byte of code for each element and one factor for each row,
 *
 *     w[n][k] = scale[n] value(code[n][k])
 *
 * int8   the code in two's complement, -127 to 127                                    largest value 127
 * fp8    E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), without infinities; 0x7f and 0xff are NaN,
 *        which no row is ever given                                                   largest value 448
 *
 * A row's scale is its absmax / (largest value), a code the nearest one to w / scale, ties to the even one: each of the two
 * quotients, and then the code, rounded once, in fp32. That is PyTorch's (w / scale).to(torch.float8_e4m3fn), and
 * torch.round(w / scale), on every machine. What is left of a weight is off by at most half a step: scale / 2 for int8; for fp8
 * 2^-4 of itself, or 2^-10 scale where that is more. A row whose absmax is below 1e-35 is all zeros, of scale 0: a
 * smaller one would be denormal. */
#pragma once
#include <stdint.h>

typedef enum lg_rows8 { LG_ROWS8_INT8, LG_ROWS8_FP8, LG_ROWS8_COUNT } lg_rows8;

/* Of all 256 codes. */
void lg_rows8_values(lg_rows8 format, float ret[256]);
/* Codes (rows, columns) and scales (rows) of w (rows, columns). Returns -1, or the number of the first row that is not
 * finite: neither it nor what follows has been written. */
int64_t lg_rows8_encode(lg_rows8 format, const float *w, int64_t rows, int64_t columns,
                        uint8_t *codes, float *scale);
