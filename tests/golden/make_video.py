#!/usr/bin/env python3
"""Makes tests/golden/video.safetensors: outputs and gradients of diffusers' transformers of clips, Latte and LTX.

Usage: python3 tests/golden/make_video.py [OUT.safetensors]
Needs numpy, torch, diffusers, safetensors.

Everything is computed in fp64, also what diffusers computes in fp32: sinusoids of timesteps, rotary angles (whose fp32 is up
to 1e-3 off at the highest frequency). Weights and inputs: see make_denoiser.py.
"""
import math
import os
import sys

import numpy as np
import torch
from diffusers import LatteTransformer3DModel, LTXVideoTransformer3DModel
from diffusers.models import normalization
from diffusers.models.transformers import transformer_ltx
from safetensors.numpy import save_file

sys.path.insert(0, os.path.dirname(__file__))
from make_denoiser import PURPOSE_SAMPLE, double, fill_model, philox_normal, record, scheduler  # noqa: E402


def rms_norm_f64(self, x):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return y if self.weight is None else y * self.weight


def rope_f64(self, hidden_states, num_frames, height, width, rope_interpolation_scale, video_coords=None):
    """LTXVideoRotaryPosEmbed.forward in fp64."""
    axes = [torch.arange(n, dtype=torch.float64) for n in (num_frames, height, width)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)
    base = torch.tensor([self.base_num_frames, self.base_height, self.base_width], dtype=torch.float64)
    grid = grid * torch.tensor(rope_interpolation_scale, dtype=torch.float64) / base
    w = self.theta ** torch.linspace(0, 1, self.dim // 6, dtype=torch.float64) * math.pi / 2
    a = (w * (grid[..., None] * 2 - 1)).transpose(-1, -2).flatten(1).repeat_interleave(2, -1)
    pad = torch.zeros(a.shape[0], self.dim % 6, dtype=torch.float64)
    a = torch.cat([pad, a], -1)[None]
    return a.cos(), a.sin()


def apply_rope_f64(x, freqs):
    cos, sin = freqs
    a, b = x.unflatten(2, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-b, a], -1).flatten(2) * sin


normalization.RMSNorm.forward = rms_norm_f64
transformer_ltx.LTXVideoRotaryPosEmbed.forward = rope_f64
transformer_ltx.apply_rotary_emb = apply_rope_f64

T, LENGTHS = [812.5, 3.25, 500.0], [6, 1, 4]
MASK = torch.arange(6)[None] < torch.tensor(LENGTHS)[:, None]


def clip(name, channels, size, scale):
    """The frames lie below one another in the hash's order, (B, C, F H, W), which is (B, C, F, H, W)."""
    f, h, w = size
    return double(name, (3, channels, f, h, w), scale)


def latte(out, prefix, size, layers):
    f, h, w = size
    m = LatteTransformer3DModel(num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=8,
                                num_layers=layers, cross_attention_dim=24, attention_bias=True, sample_size=8, patch_size=2,
                                activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
                                norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
                                caption_channels=20, video_length=f).eval()
    fill_model(m)
    m.double()
    bias = ((1 - MASK.double()) * -10000).repeat_interleave(f, 0)[:, None]
    y = m(clip("x", 4, size, 1.5), timestep=torch.tensor(T).double(), encoder_hidden_states=double("text", (3, 6, 20), 1.0),
          encoder_attention_mask=bias).sample
    record(out, prefix, m, y, clip("dout", 8, size, 1.0))


def ltx_model(layers):
    m = LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
                                   cross_attention_dim=32, num_layers=layers, caption_channels=20).eval()
    fill_model(m)
    return m.double()


def ltx(out, prefix, size, layers, frame_times=False):
    """frame_times: frame i of f has i / (f - 1) of its sample's timestep, given token by token (image-to-video)."""
    f, h, w = size
    t = torch.tensor(T).double()
    if frame_times:
        t = (t[:, None] * torch.arange(f).double() / (f - 1)).repeat_interleave(h * w, 1)
    m = ltx_model(layers)
    y = m(clip("x", 4, size, 1.5).flatten(2).transpose(1, 2), encoder_hidden_states=double("text", (3, 6, 20), 1.0),
          timestep=t, encoder_attention_mask=MASK, num_frames=f, height=h, width=w,
          rope_interpolation_scale=(8 / 25, 32, 32)).sample
    record(out, prefix, m, y.transpose(1, 2).unflatten(2, size), clip("dout", 4, size, 1.0))


@torch.no_grad()
def ltx_first_frame(out, prefix, size, layers, steps=6, guidance=3.0):
    """The loop of LTXImageToVideoPipeline: timesteps by token, 0 for those of the first frame, which no step changes."""
    f, h, w = size
    m, text = ltx_model(layers), double("text", (3, 6, 20), 1.0)
    x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 40, 4 * f * h * w)).reshape(1, 4, f, h, w)
    x[:, :, :1] = double("first_frame", (1, 4, 1, h, w), 1.0)
    is_given = torch.zeros(1, 1, f, h, w, dtype=torch.float64)
    is_given[:, :, 0] = 1

    def predict(k, t):
        y = m(x.flatten(2).transpose(1, 2), encoder_hidden_states=text[k:k + 1], timestep=t, num_frames=f, height=h, width=w,
              encoder_attention_mask=MASK[k:k + 1], rope_interpolation_scale=(8 / 25, 32, 32)).sample
        return y.transpose(1, 2).unflatten(2, size)

    s = scheduler("flow", steps)
    for i, t in enumerate(s.timesteps):
        by_token = t * (1 - is_given.flatten(1))
        y = predict(1, by_token) + guidance * (predict(0, by_token) - predict(1, by_token))
        x = torch.cat([x[:, :, :1], x[:, :, 1:] + (s.sigmas[i + 1] - s.sigmas[i]) * y[:, :, 1:]], 2)
    out[f"{prefix}.out"] = x.numpy()


def main():
    torch.set_num_threads(1)
    out = {}
    latte(out, "latte", (3, 6, 10), 2)
    latte(out, "latte_other", (5, 4, 2), 1)
    latte(out, "latte_picture", (1, 4, 10), 1)
    ltx(out, "ltx", (3, 5, 7), 2)
    ltx(out, "ltx_other", (4, 3, 2), 1)
    ltx(out, "ltx_picture", (1, 6, 5), 1)
    ltx(out, "ltx_frame_times", (3, 5, 7), 1, True)
    ltx_first_frame(out, "ltx_first_frame", (3, 5, 7), 1)
    path = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/video.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in sorted(out.items())}, path)
    print(path, len(out), "tensors")


if __name__ == "__main__":
    main()
