#!/usr/bin/env python3
"""Makes tests/golden/denoiser.safetensors: values of diffusers and PyTorch that the tests of the
denoisers, objectives, schedules and samplers compare with.

Usage: python3 tests/golden/make_denoiser.py [OUT.safetensors]
Needs numpy, torch, diffusers, safetensors.

Everything is computed in fp64. Weights and inputs are not stored: both sides make them from the
same hash of (name, element), see fill() here and golden_fill() in tests/unit/denoiser_fixture.c.
"""
import sys

import numpy as np
import torch
from diffusers import (DDIMScheduler, DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler, FluxPipeline,
                       FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel)
from diffusers.models import embeddings, normalization
from safetensors.numpy import save_file

M32 = 0xFFFFFFFF


def fnv1a(name):
    h = 2166136261
    for c in name.encode():
        h = ((h ^ c) * 16777619) & M32
    return h


def fill(name, shape, scale):
    """Element e: hash of (name, e) as a number in scale * (-1, 1), rounded to fp32."""
    n = int(np.prod(shape))
    h = (np.arange(1, n + 1, dtype=np.uint64) * 2654435761 + fnv1a(name)) & M32
    h ^= h >> 15
    h = (h * 2246822519) & M32
    h ^= h >> 13
    h = (h * 3266489917) & M32
    h ^= h >> 16
    u = (h.astype(np.float64) + 0.5) / 2.0**32
    return (scale * (2.0 * u - 1.0)).astype(np.float32).reshape(shape)


def weight_scale(shape):
    return 0.3 if len(shape) == 1 else float(np.sqrt(3.0 / np.prod(shape[1:])))


def fill_model(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(fill(name, tuple(p.shape), weight_scale(p.shape))))


def double(name, shape, scale):
    return torch.from_numpy(fill(name, shape, scale).astype(np.float64))


def timestep_embedding_f64(t, dim, flip_sin_to_cos=False, downscale_freq_shift=1, scale=1,
                           max_period=10000):
    """diffusers' get_timestep_embedding, which computes in fp32, in fp64."""
    half = dim // 2
    f = torch.exp(-np.log(max_period) * torch.arange(half, dtype=torch.float64) /
                  (half - downscale_freq_shift))
    a = scale * t[:, None].double() * f[None]
    return torch.cat([a.cos(), a.sin()] if flip_sin_to_cos else [a.sin(), a.cos()], dim=-1)


def rms_norm_f64(self, x):
    """diffusers' RMSNorm, which takes the mean in fp32, in fp64."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


embeddings.get_timestep_embedding = timestep_embedding_f64
normalization.RMSNorm.forward = rms_norm_f64

DIT = dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2,
           sample_size=8, patch_size=2, num_embeds_ada_norm=5, norm_eps=1e-5)
PIXART = dict(num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4,
              num_layers=2, sample_size=8, patch_size=2, cross_attention_dim=48,
              caption_channels=20, use_additional_conditions=False, norm_eps=1e-6)


SD3 = dict(num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4,
           num_layers=3, sample_size=8, patch_size=2, caption_projection_dim=48,
           joint_attention_dim=40, pooled_projection_dim=24, pos_embed_max_size=9,
           dual_attention_layers=(0, 1), qk_norm="rms_norm")


def make_sd3(**config):
    """With other positions than a new model's, so that it shows which of them are used."""
    m = SD3Transformer2DModel(**{**SD3, **config}).eval()
    fill_model(m)
    table = m.pos_embed.pos_embed
    table.copy_(torch.from_numpy(fill("pos_embed.pos_embed", tuple(table.shape), weight_scale(table.shape))))
    return m.double()


FLUX = dict(num_attention_heads=3, attention_head_dim=16, in_channels=16, num_layers=2,
            num_single_layers=3, joint_attention_dim=40, pooled_projection_dim=10,
            guidance_embeds=True, axes_dims_rope=(4, 4, 8))


def make_flux(**config):
    m = FluxTransformer2DModel(**{**FLUX, **config}).eval()
    fill_model(m)
    return m.double()


def run_flux(m, x, text, pooled, t, guidance):
    """The latent packed and unpacked as diffusers' pipeline does; t and guidance as the net sees them."""
    b, c, h, w = x.shape
    ids = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(h // 2.0), torch.arange(w // 2.0),
                                     indexing="ij"), -1).reshape(-1, 3)
    packed = FluxPipeline._pack_latents(x, b, c, h, w)
    y = m(packed, encoder_hidden_states=text, pooled_projections=pooled, timestep=t / 1000,
          img_ids=ids, txt_ids=torch.zeros(text.shape[1], 3),
          guidance=None if guidance is None else guidance / 1000).sample
    return FluxPipeline._unpack_latents(y, h * 8, w * 8, 8)


def sd3_texts():
    """Encoder states and pooled ones of the three texts, put together as diffusers' pipeline does."""
    clip = torch.cat([double("text", (3, 3, 12), 1.0), double("text1", (3, 3, 20), 1.0)], -1)
    clip = torch.nn.functional.pad(clip, (0, 40 - clip.shape[-1]))
    states = torch.cat([clip, double("text2", (3, 5, 40), 1.0)], -2)
    return states, torch.cat([double("pooled", (3, 10), 1.0), double("pooled1", (3, 14), 1.0)], -1)


def make_dit():
    m = DiTTransformer2DModel(**DIT).eval()
    for b in m.transformer_blocks[1:]:
        b.norm1.emb = m.transformer_blocks[0].norm1.emb
    fill_model(m)
    return m.double()


def make_pixart():
    m = PixArtTransformer2DModel(**PIXART).eval()
    fill_model(m)
    return m.double()


def record(out, prefix, model, y, dout):
    y.backward(dout)
    out[f"{prefix}.out"] = y.detach().numpy()
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        out[f"{prefix}.grad.{name}"] = grad.numpy().astype(np.float32)


def dit_case(out):
    m = make_dit()
    x, dout = double("x", (3, 4, 8, 8), 1.5), double("dout", (3, 4, 8, 8), 1.0)
    t, label = torch.tensor([999.0, 0.0, 421.0]).double(), torch.tensor([2, 5, 0])
    record(out, "dit", m, m(x, timestep=t, class_labels=label).sample, dout)


def pixart_case(out):
    m = make_pixart()
    x, dout = double("x", (3, 4, 8, 12), 1.5), double("dout", (3, 4, 8, 12), 1.0)
    t, text = torch.tensor([812.5, 3.25, 500.0]).double(), double("text", (3, 6, 20), 1.0)
    mask = torch.arange(6)[None] < torch.tensor([6, 1, 4])[:, None]
    y = m(x, encoder_hidden_states=text, timestep=t, encoder_attention_mask=mask).sample
    record(out, "pixart", m, y, dout)


def sd3_case(out):
    m = make_sd3()
    x, dout = double("x", (3, 4, 8, 12), 1.5), double("dout", (3, 4, 8, 12), 1.0)
    t, (states, pooled) = torch.tensor([812.5, 3.25, 500.0]).double(), sd3_texts()
    y = m(x, encoder_hidden_states=states, pooled_projections=pooled, timestep=t).sample
    record(out, "sd3", m, y, dout)


SD3_PLAIN = dict(num_attention_heads=2, num_layers=2, caption_projection_dim=32,
                 dual_attention_layers=(), qk_norm=None)


def run_sd3(m, dtype):
    x, dout = double("x", (3, 4, 8, 12), 1.5).to(dtype), double("dout", (3, 4, 8, 12), 1.0).to(dtype)
    t, (states, pooled) = torch.tensor([812.5, 3.25, 500.0]).to(dtype), sd3_texts()
    m.to(dtype).zero_grad()
    return m(x, encoder_hidden_states=states.to(dtype), pooled_projections=pooled.to(dtype), timestep=t).sample, dout


def sd3_plain_case(out):
    """As SD3-medium has it. Says how far PyTorch's own fp32 is from its fp64: the measure of what to ask of another."""
    m = make_sd3(**SD3_PLAIN)
    y, dout = run_sd3(m, torch.float64)
    record(out, "sd3_plain", m, y, dout)
    want = {k: p.grad.clone() for k, p in m.named_parameters() if p.grad is not None}
    y, dout = run_sd3(m, torch.float32)
    y.backward(dout)
    errors = {k: ((p.grad - want[k]).norm() / want[k].norm().clamp_min(0.3)).item()
              for k, p in m.named_parameters() if k in want}
    worst = max(errors, key=errors.get)
    print(f"sd3_plain: PyTorch's gradients in fp32 are at most {errors[worst]:.1e} off ({worst})")


def flux_case(out):
    m = make_flux()
    x, dout = double("x", (3, 4, 8, 12), 1.5), double("dout", (3, 4, 8, 12), 1.0)
    t, guidance = torch.tensor([812.5, 3.25, 500.0]).double(), torch.tensor([3500., 1000., 0.]).double()
    y = run_flux(m, x, double("text1", (3, 5, 40), 1.0), double("pooled", (3, 10), 1.0), t, guidance)
    record(out, "flux", m, y, dout)


# ---- samplers ----

def philox_normal(seed, purpose, n, count):
    """base/philox.c: standard normals of stream (seed, purpose, n)."""
    z = []
    for block in range((count + 3) // 4):
        c = [block & M32, block >> 32, n & M32, n >> 32]
        k0, k1 = seed & M32, (seed >> 32) ^ (purpose * 0x9E3779B9 & M32)
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(p1 >> 32) ^ c[1] ^ k0, p1 & M32, (p0 >> 32) ^ c[3] ^ k1, p0 & M32]
            k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
        u = [(v + 0.5) * 2.0**-32 for v in c]
        for a, b in ((u[0], u[1]), (u[2], u[3])):
            r = np.sqrt(-2.0 * np.log(a))
            z += [r * np.cos(2 * np.pi * b), r * np.sin(2 * np.pi * b)]
    return np.array(z[:count]).astype(np.float32).astype(np.float64)


PURPOSE_SAMPLE = 9


def scheduler(kind, steps):
    if kind == "flow":
        s = FlowMatchEulerDiscreteScheduler()
        s.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps))
        s.sigmas = torch.cat([torch.arange(steps, 0, -1, dtype=torch.float64) / steps,
                              torch.zeros(1, dtype=torch.float64)])
        s.timesteps = s.sigmas[:-1] * 1000
        return s
    s = DDIMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False,
                      timestep_spacing="trailing", set_alpha_to_one=True,
                      prediction_type={"eps": "epsilon", "v": "v_prediction"}[kind])
    s.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    s.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    s.set_timesteps(steps)
    return s


def trajectory(kind, steps, model, x):
    s = scheduler(kind, steps)
    for t in s.timesteps:
        # upcast_sample of the flow scheduler goes through fp32: step by its own formula there.
        m = model(x, t)
        if kind == "flow":
            i = int((s.timesteps == t).nonzero()[0])
            x = x + (s.sigmas[i + 1] - s.sigmas[i]) * m
        else:
            x = s.step(m, int(t), x).prev_sample
    return x


def check_flow_formula():
    """The formula above is diffusers' own, to its fp32."""
    s = scheduler("flow", 10)
    x, f = double("flow", (1, 2, 2, 2), 1.0), lambda v, t: 0.7 * v - 0.2 * (t / 1000)
    y = x
    for t in s.timesteps:
        y = s.step(f(y, t), t, y).prev_sample
    z = trajectory("flow", 10, f, x)
    assert (y - z).abs().max() < 1e-5, (y - z).abs().max()


def sampler_cases(out):
    toy = lambda x, t: 0.6 * x + 0.3 * np.cos(float(t) / 100.0)
    for kind in ("eps", "v", "flow"):
        for steps in (10, 25):
            out[f"sampler.toy.{kind}.{steps}"] = trajectory(
                kind, steps, toy, double("toy", (16,), 1.0)).numpy()
    pixart, dit = make_pixart(), make_dit()
    text = double("text", (3, 6, 20), 1.0)
    mask = torch.arange(6)[None] < torch.tensor([6, 1, 4])[:, None]

    def guided_pixart(x, t, g=3.0):
        def f(k):
            return pixart(x, encoder_hidden_states=text[k:k + 1], encoder_attention_mask=mask[k:k + 1],
                          timestep=torch.as_tensor([float(t)]).double()).sample
        return f(1) + g * (f(0) - f(1))

    def guided_dit(x, t, g=1.5):
        def f(k):
            return dit(x, timestep=torch.as_tensor([float(t)]).double(),
                       class_labels=torch.tensor([k])).sample
        return f(5) + g * (f(2) - f(5))

    with torch.no_grad():
        x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 40, 4 * 8 * 12)).reshape(1, 4, 8, 12)
        out["sampler.pixart.flow"] = trajectory("flow", 10, guided_pixart, x).numpy()
        x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 41, 4 * 8 * 8)).reshape(1, 4, 8, 8)
        out["sampler.dit.v"] = trajectory("v", 10, guided_dit, x).numpy()
        out["sampler.dit.eps"] = trajectory("eps", 5, guided_dit, x).numpy()


# ---- objectives and schedules ----

def objective_cases(out):
    a = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).numpy()
    snr = a / (1 - a)
    out["objective.alpha_bar"] = a
    out["objective.min_snr.eps"] = np.minimum(snr, 5.0) / snr
    out["objective.min_snr.v"] = np.minimum(snr, 5.0) / (snr + 1)
    s = scheduler("v", 10)
    x0, e = double("x0", (1000,), 1.0), double("e", (1000,), 1.0)
    t = torch.arange(1000)
    out["objective.x_t"] = s.add_noise(x0, e, t).numpy()
    out["objective.v"] = s.get_velocity(x0, e, t).numpy()


def rates(make, steps):
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = torch.optim.SGD([p], lr=0.01)
    s = make(opt)
    r = []
    for _ in range(steps):
        r.append(opt.param_groups[0]["lr"])
        opt.step()
        s.step()
    return np.array(r)


def schedule_cases(out):
    from torch.optim import lr_scheduler as lr

    def warm(after):
        return lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 9), after(o)], [10])

    out["schedule.constant"] = rates(warm(lambda o: lr.ConstantLR(o, 1.0, 0)), 50)
    out["schedule.cosine"] = rates(warm(lambda o: lr.CosineAnnealingLR(o, 40, eta_min=0.001)), 50)
    out["schedule.linear"] = rates(warm(lambda o: lr.LinearLR(o, 1.0, 0.1, 40)), 50)


def main():
    torch.set_num_threads(1)
    out = {}
    check_flow_formula()
    dit_case(out)
    pixart_case(out)
    sd3_case(out)
    sd3_plain_case(out)
    flux_case(out)
    sampler_cases(out)
    objective_cases(out)
    schedule_cases(out)
    path = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/denoiser.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in sorted(out.items())}, path)
    print(path, len(out), "tensors")


if __name__ == "__main__":
    main()
