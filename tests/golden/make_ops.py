"""Writes tests/golden/ops_golden.h: outputs of PyTorch, transformers and diffusers for
tests/unit/test_ops_ref.c.

Usage: python3 make_ops.py > ops_golden.h   (needs torch, transformers, diffusers; float64 throughout)

Inputs are not stored: element i of input number k is wave(k)[i] = sin(k + 0.7 i + 0.01 i^2), which
the test computes likewise.
"""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_timestep_embedding
from transformers.activations import QuickGELUActivation
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm

torch.set_default_dtype(torch.float64)


def wave(k, *shape):
    i = np.arange(int(np.prod(shape)), dtype=np.float64)
    return torch.from_numpy(np.sin(k + 0.7 * i + 0.01 * i * i)).reshape(shape)


def emit(name, values, kind="double", fmt="{!r}"):
    flat = [fmt.format(v) for v in values.reshape(-1).tolist()]
    print(f"static const {kind} {name}[{len(flat)}] = {{")
    line = "   "
    for v in flat:
        if len(line) + len(v) + 2 > 100:
            print(line)
            line = "   "
        line += f" {v},"
    print(line + "\n};")


def adamw():
    w = torch.nn.Parameter(wave(1, 5))
    opt = torch.optim.AdamW([w], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        w.grad = wave(10 + step, 5)
        opt.step()
    emit("ADAMW_W", w.detach())
    emit("ADAMW_M", opt.state[w]["exp_avg"])
    emit("ADAMW_V", opt.state[w]["exp_avg_sq"])


def attention():
    B, TQ, TK, H, D = 2, 3, 4, 2, 3
    q, k, v = (wave(1, B, TQ, H, D), wave(2, B, TK, H, D), wave(3, B, TK, H, D))
    for x in (q, k, v):
        x.requires_grad_()
    lengths = torch.tensor([4, 2])
    mask = torch.where(torch.arange(TK) < lengths[:, None], 0.0, -torch.inf)[:, None, None, :]
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    biased = F.scaled_dot_product_attention(*heads, attn_mask=mask + wave(4, H, TQ, TK), scale=0.8)
    emit("ATTENTION_BIASED_O", biased.transpose(1, 2).detach())
    o = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.8).transpose(1, 2)
    scores = 0.8 * heads[0] @ heads[1].transpose(2, 3) + mask
    o.backward(wave(5, B, TQ, H, D))
    emit("ATTENTION_O", o.detach())
    emit("ATTENTION_LSE", torch.logsumexp(scores, -1).detach())
    emit("ATTENTION_DQ", q.grad)
    emit("ATTENTION_DK", k.grad)
    emit("ATTENTION_DV", v.grad)
    q, k, v = (wave(n, B, TK, H, D).transpose(1, 2) for n in (1, 2, 3))
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.8)
    emit("ATTENTION_CAUSAL_O", causal.transpose(1, 2))


def norms():
    x, mod, r = wave(1, 2, 3, 4).requires_grad_(), wave(2, 2, 8).requires_grad_(), wave(3, 2, 3, 4)
    shift, scale = mod[:, None, :4], mod[:, None, 4:]
    y = F.layer_norm(x, (4,), eps=1e-6) * (1 + scale) + shift
    y.backward(r)
    emit("NORM_Y", y.detach())
    emit("NORM_DX", x.grad)
    emit("NORM_DMOD", mod.grad)
    rms = T5LayerNorm(4, eps=1e-6)
    rms.weight.data = wave(2, 4)
    y = F.rms_norm(wave(1, 3, 4), (4,), wave(2, 4), eps=1e-6)
    assert torch.allclose(y, rms(wave(1, 3, 4)), rtol=1e-6)  # which takes the mean in fp32
    emit("RMS_Y", y)
    emit("LAYER_NORM_Y", F.layer_norm(wave(1, 3, 4), (4,), wave(2, 4), wave(3, 4), eps=1e-5))
    gn = F.group_norm(wave(1, 2, 2, 3, 6).permute(0, 3, 1, 2), 3, wave(2, 6), wave(3, 6), eps=1e-6)
    emit("GROUP_NORM_SILU_Y", F.silu(gn).permute(0, 2, 3, 1))


def conv():
    x, w = wave(1, 2, 4, 5, 3).permute(0, 3, 1, 2), wave(2, 2, 3, 3, 3).permute(0, 3, 1, 2)
    y = F.conv2d(F.pad(x, (0, 1, 0, 1)), w, wave(3, 2), stride=2)
    emit("CONV_Y", y.permute(0, 2, 3, 1))
    emit("CONV_SHAPE", torch.tensor(y.shape), "int")


def embeddings():
    rel = torch.arange(-140, 141)
    emit("T5_BUCKETS", T5Attention._relative_position_bucket(rel, True, 32, 128), "int")
    t = torch.tensor([0.0, 1.0, 37.5, 999.0])
    for shift in (0, 1):
        e = get_timestep_embedding(t, 8, flip_sin_to_cos=True, downscale_freq_shift=shift)
        emit(f"TIMESTEP_SHIFT_{shift}", e.double())


def patches():
    """Patches meet their weights as in diffusers' PatchEmbed, and leave as in DiTTransformer2DModel."""
    w = wave(2, 5, 3, 2, 2)
    y = F.conv2d(wave(1, 2, 3, 4, 6), w, stride=2).flatten(2).transpose(1, 2)
    emit("PATCH_EMBED_Y", y)
    x = wave(1, 2, 2, 3, 2, 2, 3)
    emit("UNPATCHIFY_Y", torch.einsum("nhwpqc->nchpwq", x).reshape(2, 3, 4, 6))


def linear():
    y = F.gelu(F.linear(wave(1, 3, 4), wave(2, 5, 4), wave(3, 5)), approximate="tanh")
    emit("LINEAR_GELU_Y", y)


def activations():
    x = (4 * wave(1, 12)).requires_grad_()
    for name, y in (("GELU_ERF", F.gelu(x)), ("QUICK_GELU", QuickGELUActivation()(x))):
        emit(f"{name}_Y", y.detach())
        emit(f"{name}_SLOPE", torch.autograd.grad(y.sum(), x)[0])


def cast():
    x = [0.0, -0.0, 1.0, 65504.0, 65519.996, 65520.0, -1e6, 3.4e38, 6e-8, 2.9e-8, 3.1e-8, 6.1e-5]
    x += [1.00048828125, 1.00146484375, 1.00390625, 1.01171875, 1e-40, float("inf"), 1 / 3, -2.71828]
    x = torch.tensor(x, dtype=torch.float32)
    emit("CAST_X", x.view(torch.int32), "int32_t")
    emit("CAST_F16", x.half().view(torch.int16).int() & 0xFFFF, "uint16_t", "0x{:04x}")
    emit("CAST_BF16", x.bfloat16().view(torch.int16).int() & 0xFFFF, "uint16_t", "0x{:04x}")


print("/* Made by make_ops.py; do not edit. */\n#pragma once\n#include <stdint.h>\n")
for part in (adamw, attention, norms, conv, embeddings, patches, linear, activations, cast):
    part()
