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
    x, w = wave(1, 3, 4).requires_grad_(), wave(2, 4).requires_grad_()
    y = F.rms_norm(x, (4,), w, eps=1e-6)
    y.backward(wave(3, 3, 4))
    y = y.detach()
    assert torch.allclose(y, rms(wave(1, 3, 4)), rtol=1e-6)  # which takes the mean in fp32
    emit("RMS_Y", y)
    emit("RMS_DX", x.grad)
    emit("RMS_DW", w.grad)
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


def learned_range():
    """GaussianDiffusion.training_losses of "Improved DDPM" (MSE + variational bound, learned range): betas from 1e-4
    to 0.02, one sample at each of five timesteps; x_0 reaches beyond the open bins."""
    steps, C = torch.tensor([0, 0, 1, 500, 999]), 12
    beta = torch.linspace(1e-4, 0.02, 1000)
    bar = torch.cumprod(1 - beta, 0)
    before = torch.cat([torch.ones(1), bar[:-1]])
    posterior = beta * (1 - before) / (1 - bar)
    low, high = torch.log(torch.cat([posterior[1:2], posterior[1:]])), torch.log(beta)
    at = lambda a: a[steps][:, None]
    x0, noise = 1.4 * wave(1, 5, C), wave(2, 5, C)
    pred, v = (wave(3, 5, C) * torch.tensor([0.9, 0.02, 0.5, 1, 1])[:, None] + noise).requires_grad_(), wave(4, 5, C).requires_grad_()
    x_t = at(bar).sqrt() * x0 + (1 - at(bar)).sqrt() * noise
    mean = lambda start: (at(beta * before.sqrt() / (1 - bar)) * start
                          + at((1 - before) * (1 - beta).sqrt() / (1 - bar)) * x_t)
    predicted = mean((x_t - (1 - at(bar)).sqrt() * pred.detach()) / at(bar).sqrt())
    log_variance = at(low) + (v + 1) / 2 * (at(high) - at(low))
    kl = 0.5 * (-1 + log_variance - at(low) + torch.exp(at(low) - log_variance)
                + (mean(x0) - predicted) ** 2 * torch.exp(-log_variance))
    cdf = lambda x: 0.5 * (1 + torch.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    scale = torch.exp(-0.5 * log_variance)
    above, below = cdf(scale * (x0 - predicted + 1 / 255)), cdf(scale * (x0 - predicted - 1 / 255))
    inside = torch.where(x0 < -0.999, above, torch.where(x0 > 0.999, 1 - below, above - below))
    nll = -torch.log(inside.clamp(min=1e-12))
    vb = torch.where(steps[:, None] == 0, nll, kl).mean(1) / np.log(2)
    mse = ((noise - pred) ** 2).mean(1)
    (mse.sum() + vb.sum()).backward()
    emit("LEARNED_RANGE_PRED", torch.cat([pred, v], 1).detach())
    emit("LEARNED_RANGE_NOISE", noise)
    emit("LEARNED_RANGE_X_T", x_t)
    emit("LEARNED_RANGE_LOSS", torch.stack([mse, vb], 1).detach())
    emit("LEARNED_RANGE_DPRED", torch.cat([pred.grad, v.grad], 1))


print("/* Made by make_ops.py; do not edit. */\n#pragma once\n#include <stdint.h>\n")
for part in (adamw, attention, norms, conv, embeddings, patches, linear, activations, cast, learned_range):
    part()
