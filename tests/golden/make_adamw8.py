"""Writes tests/golden/adamw8_golden.h: three steps of AdamW with moments of 8 bits, for tests/unit/test_ops_ref.c.

Usage: python3 make_adamw8.py > adamw8_golden.h   (needs numpy, torch, bitsandbytes)

bitsandbytes makes such steps on GPUs alone, so they are written here, in float64, as its kernel makes them; the maps are
compared with bitsandbytes' own, and the codes with those that it gives on the CPU. Inputs are those of make_ops.py: element i of input
number k is sin(k + 0.7 i + 0.01 i^2). In the second step the gradient of element 300 is not a number.
"""

import numpy as np
import torch
from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

N, BLOCK = 600, 256
LR, BETA1, BETA2, EPS, DECAY = 0.1, 0.9, 0.99, 1e-8, 0.1


def wave(k):
    i = np.arange(N, dtype=np.float64)
    return np.sin(k + 0.7 * i + 0.01 * i * i)


def dynamic_map(signed):
    data = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1 if signed else 2 ** (i + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        data += list(means) + (list(-means) if signed else [])
    theirs = create_dynamic_map(signed=signed).double().numpy()
    assert len(data) == 256 and np.allclose(sorted(data), theirs, rtol=2e-7, atol=0)
    return np.array(sorted(data))


def encode(table, x, signed):
    nearest = np.abs(table[None, :] - x[:, None]).argmin(axis=1)
    if x.any():
        code = torch.from_numpy(table).float()
        theirs, state = quantize_blockwise(torch.from_numpy(x).float(), code=code, blocksize=BLOCK)
        theirs = theirs.numpy()
        # On the CPU it finds codes by a coarser table, which now and then is off by a neighbour.
        assert state.absmax.item() == 1 and (theirs == nearest).mean() >= 0.98
        assert (np.abs(table[nearest] - x) <= np.abs(table[theirs] - x)).all()
    if signed:  # the sign stays
        nearest -= (x < 0) & (table[nearest] >= 0)
    return nearest


def emit(name, values, kind):
    flat = [repr(v) for v in values.tolist()]
    print(f"static const {kind} {name}[{len(flat)}] = {{")
    line = "   "
    for v in flat:
        if len(line) + len(v) + 2 > 100:
            print(line)
            line = "   "
        line += f" {v},"
    print(line + "\n};")


def step(t, w, state, g):
    c1, c2 = 1 - BETA1**t, np.sqrt(1 - BETA2**t)
    for at in range(0, N, BLOCK):
        part = slice(at, min(at + BLOCK, N))
        b, ok = at // BLOCK, np.isfinite(g[part])
        gs = np.where(ok, g[part], 0)
        m = (M_MAP[state["m"][part]] * state["m_max"][b] * BETA1 + (1 - BETA1) * gs) * ok
        v = (V_MAP[state["v"][part]] * state["v_max"][b] * BETA2 + (1 - BETA2) * gs * gs) * ok
        moved = (w[part] - LR * c2 / c1 * m / (np.sqrt(v) + c2 * EPS)) * (1 - LR * DECAY)
        w[part] = np.where(ok, moved, w[part])
        state["m_max"][b], state["v_max"][b] = np.abs(m).max(), v.max()
        state["m"][part] = encode(M_MAP, m / state["m_max"][b], True)
        state["v"][part] = encode(V_MAP, v / state["v_max"][b], False)


M_MAP, V_MAP = dynamic_map(True), dynamic_map(False)
weights = wave(1)
moments = {"m": np.full(N, 127), "v": np.zeros(N, dtype=int), "m_max": np.zeros(3), "v_max": np.zeros(3)}
for number in range(3):
    gradient = wave(10 + number)
    if number == 1:
        gradient[300] = np.nan
    step(number + 1, weights, moments, gradient)
print("/* Made by make_adamw8.py; do not edit. */\n#pragma once\n#include <stdint.h>\n")
emit("ADAMW8_W", weights, "double")
emit("ADAMW8_M", moments["m"], "uint8_t")
emit("ADAMW8_V", moments["v"], "uint8_t")
emit("ADAMW8_M_MAX", moments["m_max"], "double")
emit("ADAMW8_V_MAX", moments["v_max"], "double")
