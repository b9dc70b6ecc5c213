"""Writes tests/golden/rows8_golden.h: matrices in 8 bits as PyTorch makes them, for tests/unit/test_rows8.c.

Usage: python3 make_rows8.py > rows8_golden.h   (needs numpy, torch)

Element i of row r comes of the integer u = 2654435761 (1000 r + i + 1) mod 2^32: as a signed one, times 2^-(u mod 13) and
2^-(3 r). Row 2 is zero.
"""

import numpy as np
import torch

ROWS, COLUMNS = 6, 100


def matrix():
    r, i = np.meshgrid(np.arange(ROWS, dtype=np.uint64), np.arange(COLUMNS, dtype=np.uint64), indexing="ij")
    u = (np.uint64(2654435761) * (np.uint64(1000) * r + i + np.uint64(1))) % np.uint64(1 << 32)
    w = u.astype(np.uint32).view(np.int32).astype(np.float32)
    w = np.ldexp(w, -((u % np.uint64(13)).astype(int) + 3 * r.astype(int))).astype(np.float32)
    w[2] = 0
    return torch.from_numpy(w)


def emit(name, values, kind):
    print(f"static const {kind} {name}[{values.numel()}] = {{")
    text = [f"0x{v:08x}" if kind == "uint32_t" else str(v) for v in values.flatten().tolist()]
    for at in range(0, len(text), 12):
        print("    " + ", ".join(text[at : at + 12]) + ",")
    print("};")


def bits(x):
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


w = matrix()
absmax = w.abs().amax(dim=1, keepdim=True)
safe = torch.where(absmax > 0, absmax, torch.ones_like(absmax))
fp8_scale, int8_scale = safe / 448, safe / 127
fp8 = (w / fp8_scale).to(torch.float8_e4m3fn)
int8 = torch.round(w / int8_scale).to(torch.int8)
zero = torch.zeros_like(absmax)
every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
every = torch.where(every.isnan(), torch.full_like(every, float("nan")), every)

print("/* Made by make_rows8.py; do not edit. */\n#pragma once\n#include <stdint.h>\n")
print(f"enum {{ ROWS8_ROWS = {ROWS}, ROWS8_COLUMNS = {COLUMNS} }};")
emit("ROWS8_FP8_CODES", fp8.view(torch.uint8), "uint8_t")
emit("ROWS8_FP8_SCALE", bits(torch.where(absmax > 0, fp8_scale, zero)), "uint32_t")
emit("ROWS8_INT8_CODES", int8.view(torch.uint8), "uint8_t")
emit("ROWS8_INT8_SCALE", bits(torch.where(absmax > 0, int8_scale, zero)), "uint32_t")
emit("ROWS8_FP8_VALUES", bits(every), "uint32_t")
