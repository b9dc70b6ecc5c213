#!/usr/bin/env python3
"""Makes tests/golden/published.safetensors: what diffusers computes with the variations of DiT and PixArt that published
models have, with its noise schedules, samplers and training weights. For tests/unit/test_published.c.

Usage: python3 tests/golden/make_published.py [OUT.safetensors]
Needs numpy, torch, diffusers, safetensors; weights and inputs as in make_denoiser.py. fp64, but for what a scheduler does in
fp32 inside.

Of a tensor only a digest is kept: its norm and three products with numbers of fill().
"""
import sys
from unittest import mock

import numpy as np
import torch
from diffusers import (DiTTransformer2DModel, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler,
                       PixArtTransformer2DModel)
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr
from diffusers.training_utils import (compute_density_for_timestep_sampling,
                                      compute_loss_weighting_for_sd3)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from make_denoiser import (PURPOSE_SAMPLE, M32, SD3, SD3Transformer2DModel, double, fill, fill_model, make_flux, philox_normal,
                           make_sd3, run_flux, sd3_texts)
from safetensors.numpy import save_file


def digest(v):
    v = v.detach().double().reshape(-1).numpy()
    return np.array([np.linalg.norm(v)] + [fill(f"digest{k}", v.shape, 1.0).astype(np.float64) @ v for k in range(3)])


# ---- nets ----

DITS = {  # the latent's side beside the model's sample_size
    "dit.variance": (dict(sample_size=6, out_channels=8), 10),
    "dit.no_bias": (dict(sample_size=14, attention_bias=False, norm_eps=1e-6), 6),
}
PIXARTS = {
    "pixart.size": (dict(sample_size=10, out_channels=8, use_additional_conditions=True, interpolation_scale=0.5), (10, 6)),
    "pixart.scale": (dict(sample_size=6, out_channels=4, interpolation_scale=2, attention_bias=False), (14, 10)),
    "pixart.default": (dict(sample_size=128, out_channels=8, use_additional_conditions=False), (6, 10)),
}
COMMON = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, num_layers=2, patch_size=2)
SIZE, RATIO = [[1024.0, 768.0], [333.0, 517.0], [64.0, 4096.0]], [1.3125, 0.5, 2.25]


def make(kind, config):
    m = kind(**COMMON, **config).eval()
    if kind is DiTTransformer2DModel:
        for b in m.transformer_blocks[1:]:
            b.norm1.emb = m.transformer_blocks[0].norm1.emb
    fill_model(m)
    return m.double()


def make_dit(config):
    return make(DiTTransformer2DModel, dict(num_embeds_ada_norm=5, **config))


def make_pixart(config):
    return make(PixArtTransformer2DModel, dict(cross_attention_dim=24, caption_channels=20, **config))


def conditions(config, rows):
    if not config.get("use_additional_conditions"):
        return {"resolution": None, "aspect_ratio": None}
    return {"resolution": torch.tensor(SIZE).double()[rows], "aspect_ratio": torch.tensor(RATIO).double()[rows, None]}


def record(out, name, model, y):
    y.backward(double("dout", tuple(y.shape), 1.0))
    out[f"{name}.out"] = digest(y)
    for p, v in model.named_parameters():
        out[f"{name}.grad.{p}"] = digest(v.grad)


def net_cases(out):
    for name, (config, side) in DITS.items():
        m = make_dit(config)
        t, label = torch.tensor([999.0, 0.0, 421.0]).double(), torch.tensor([2, 5, 0])
        record(out, name, m, m(double("x", (3, 4, side, side), 1.5), timestep=t, class_labels=label).sample)
    for name, (config, (h, w)) in PIXARTS.items():
        m = make_pixart(config)
        t, text = torch.tensor([812.5, 3.25, 500.0]).double(), double("text", (3, 6, 20), 1.0)
        mask = torch.arange(6)[None] < torch.tensor([6, 1, 4])[:, None]
        record(out, name, m,
               m(double("x", (3, 4, h, w), 1.5), encoder_hidden_states=text, timestep=t, encoder_attention_mask=mask,
                 added_cond_kwargs=conditions(config, slice(None))).sample)


# ---- noise ----

def bars(schedule, first, last):
    if schedule == "linear":
        return 1 - torch.linspace(first, last, 1000, dtype=torch.float64)
    return 1 - torch.linspace(first**0.5, last**0.5, 1000, dtype=torch.float64) ** 2


def philox(seed, purpose, n):
    c, k0, k1 = [0, 0, n & M32, n >> 32], seed & M32, (seed >> 32) ^ (purpose * 0x9E3779B9 & M32)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & M32, (p0 >> 32) ^ c[3] ^ k1, p0 & M32]
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return [(v + 0.5) * 2.0**-32 for v in c]


PURPOSE_TIMESTEP = 6


def noise_cases(out):
    alphas = bars("scaled_linear", 0.00085, 0.012)
    out["alpha_bar.scaled"] = torch.cumprod(alphas, 0).numpy()
    out["alpha_bar.zero_snr"] = torch.cumprod(1 - rescale_zero_terminal_snr(1 - alphas), 0).numpy()
    s = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    for kind in ("sigma_sqrt", "cosmap"):
        out[f"weighting.{kind}"] = compute_loss_weighting_for_sd3(kind, s).numpy()
    u = [philox(5, PURPOSE_TIMESTEP, n) for n in range(64)]
    with mock.patch("torch.rand", lambda **_: torch.tensor([v[0] for v in u], dtype=torch.float64)):
        out["timesteps.mode"] = compute_density_for_timestep_sampling("mode", 64, mode_scale=1.29).numpy()
    z = [np.sqrt(-2 * np.log(v[0])) * np.cos(2 * np.pi * v[1]) for v in u]
    with mock.patch("torch.normal", lambda mean, std, **_: torch.tensor(z) * std + mean):
        out["timesteps.logit_normal"] = compute_density_for_timestep_sampling(
            "logit_normal", 64, logit_mean=0.7, logit_std=1.5).numpy()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    out["flow_shift"] = scheduler.sigmas.double().numpy()


# ---- samplers ----

TOKENS = (24, 256, 1000, 4096)
LTX_TOKENS = (384, 1024, 2496)


def dpm(prediction, spacing, steps, scaled=False, zero=False):
    s = DPMSolverMultistepScheduler(
        beta_start=0.00085 if scaled else 1e-4, beta_end=0.012 if scaled else 0.02,
        beta_schedule="scaled_linear" if scaled else "linear", timestep_spacing=spacing,
        prediction_type={"eps": "epsilon", "v": "v_prediction"}[prediction], rescale_betas_zero_snr=zero)
    s.set_timesteps(steps)
    return s


def dynamic_flow(steps, tokens):
    """As FLUX's pipeline sets it for a picture of so many tokens."""
    s = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                                        base_image_seq_len=256, max_image_seq_len=4096)
    s.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps),
                    mu=calculate_shift(tokens, 256, 4096, 0.5, 1.15))
    return s


def ltx_flow(steps, tokens):
    """As LTX-Video's pipeline and its scheduler's config set it for a clip of so many tokens."""
    s = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05,
                                        base_image_seq_len=1024, max_image_seq_len=4096, shift_terminal=0.1)
    s.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps),
                    mu=calculate_shift(tokens, 1024, 4096, 0.95, 2.05))
    return s


def flow(spacing, steps, shift):
    s = FlowMatchEulerDiscreteScheduler(shift=shift)
    if spacing == "trailing":
        s.set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps))
    else:
        s.set_timesteps(steps)
    return s


def run(s, model, x):
    for t in s.timesteps:
        x = s.step(model(x, float(t)), t, x).prev_sample
    return x


def sampler_cases(out):
    toy = lambda x, t: 0.6 * x + 0.3 * np.cos(t / 100.0)
    x = double("toy", (16,), 1.0)
    for spacing in ("trailing", "linspace"):
        for steps in (1, 2, 3, 10, 25):
            for kind in ("eps", "v"):
                s = dpm(kind, spacing, steps)
                out[f"dpm.{kind}.{spacing}.{steps}"] = run(s, toy, x).numpy()
                out[f"dpm.{kind}.{spacing}.{steps}.t"] = s.timesteps.double().numpy()
            s = flow(spacing, steps, 3.0)
            out[f"flow.{spacing}.{steps}"] = run(s, toy, x).numpy()
            out[f"flow.{spacing}.{steps}.t"] = s.timesteps.double().numpy()
    for tokens in TOKENS:
        s = dynamic_flow(10, tokens)
        out[f"flow.tokens.{tokens}"] = run(s, toy, x).numpy()
        out[f"flow.tokens.{tokens}.t"] = s.timesteps.double().numpy()
    for tokens in LTX_TOKENS:
        s = ltx_flow(10, tokens)
        out[f"flow.ltx.{tokens}"] = run(s, toy, x).numpy()
        out[f"flow.ltx.{tokens}.t"] = s.timesteps.double().numpy()
    out["dpm.v.zero_snr"] = run(dpm("v", "trailing", 10, scaled=True, zero=True), toy, x).numpy()
    config, (h, w) = PIXARTS["pixart.size"]
    net, text = make_pixart(config), double("text", (3, 6, 20), 1.0)
    mask = torch.arange(6)[None] < torch.tensor([6, 1, 4])[:, None]

    def guided(x, t):
        def f(k):
            y = net(x, encoder_hidden_states=text[k:k + 1], encoder_attention_mask=mask[k:k + 1],
                    timestep=torch.tensor([t]).double(), added_cond_kwargs=conditions(config, slice(0, 1))).sample
            return y[:, :4]
        return f(1) + 4.5 * (f(0) - f(1))

    with torch.no_grad():
        x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 40, 4 * h * w)).reshape(1, 4, h, w)
        out["dpm.net"] = run(dpm("eps", "linspace", 8), guided, x).numpy()


def flux_case(out):
    """A distilled net is told the guidance; there is no second pass."""
    net = make_flux()
    text, pooled = double("text1", (3, 5, 40), 1.0)[:1], double("pooled", (3, 10), 1.0)[:1]
    told = torch.tensor([3500.0]).double()
    x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 40, 4 * 8 * 12)).reshape(1, 4, 8, 12)
    with torch.no_grad():
        out["flux.drawn"] = run(dynamic_flow(6, 24), lambda v, t: run_flux(
            net, v, text, pooled, torch.tensor([t]).double(), told), x).numpy()


def sd3_case(out):
    """Two passes, of a caption and of another, by the scheduler's own timesteps."""
    net, (states, pooled) = make_sd3(), sd3_texts()

    def guided(x, t):
        def f(k):
            return net(x, encoder_hidden_states=states[k:k + 1], pooled_projections=pooled[k:k + 1],
                       timestep=torch.tensor([t]).double()).sample
        return f(1) + 7.0 * (f(0) - f(1))

    x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 40, 4 * 8 * 12)).reshape(1, 4, 8, 12)
    with torch.no_grad():
        out["sd3.drawn"] = run(flow("linspace", 6, 3.0), guided, x).numpy()


POSITIONS = ((9, 4, 1), (12, 16, 2), (5, 7, 0.5))  # patches of the table on a side, of the model, and their scale


def position_cases(out):
    for side, base, scale in POSITIONS:
        out[f"positions.{side}"] = get_2d_sincos_pos_embed(
            16, side, base_size=base, interpolation_scale=scale, output_type="pt").float().numpy()
    out["positions.sd3"] = SD3Transformer2DModel(**SD3).pos_embed.pos_embed.float().numpy()


def main():
    torch.set_num_threads(1)
    out = {}
    net_cases(out)
    noise_cases(out)
    sampler_cases(out)
    flux_case(out)
    sd3_case(out)
    position_cases(out)
    path = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/published.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in sorted(out.items())}, path)
    print(path, len(out), "tensors")


if __name__ == "__main__":
    main()
