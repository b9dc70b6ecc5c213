#!/usr/bin/env python3
"""Makes tests/golden/unet.safetensors: values of diffusers' UNet2DConditionModel, as SD 2 and as SDXL have it, that
tests/unit/test_unet.c compares with: outputs, the gradient of every parameter, latents that are drawn.

Usage: python3 tests/golden/make_unet.py [OUT.safetensors]
Needs what make_denoiser.py needs, whose weights and inputs these are. Everything is computed in fp64.
"""
import sys

import numpy as np
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, UNet2DConditionModel
from safetensors.numpy import save_file

from make_denoiser import PURPOSE_SAMPLE, double, fill_model, philox_normal, record

SD2 = dict(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16, 16), layers_per_block=1,
           down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
           up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
           attention_head_dim=(1, 2, 4), cross_attention_dim=20, norm_num_groups=4,
           use_linear_projection=True)
SDXL = dict(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2),
            attention_head_dim=(1, 2), cross_attention_dim=32, norm_num_groups=4,
            use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=6,
            projection_class_embeddings_input_dim=14 + 6 * 6)
SIZES = torch.tensor([[1024, 768, 0, 96, 512, 512], [333, 517, 40, 0, 768, 512], [64, 4096, 7, 1, 1024, 1024]]).double()


def make(config):
    m = UNet2DConditionModel(**config).eval()
    fill_model(m)
    return m.double()


def run(m, config, x, t, text, pooled=None, sizes=None):
    more = None if pooled is None else {"text_embeds": pooled, "time_ids": sizes}
    return m(x, t, encoder_hidden_states=text, added_cond_kwargs=more).sample


def texts(config):
    if config is SD2:
        return double("text", (3, 5, 20), 1.0), None
    return (torch.cat([double("text", (3, 5, 12), 1.0), double("text1", (3, 5, 20), 1.0)], -1),
            double("pooled1", (3, 14), 1.0))


def case(out, name, config, height, width):
    m = make(config)
    x, dout = double("x", (3, 4, height, width), 1.5), double("dout", (3, 4, height, width), 1.0)
    t = torch.tensor([812.5, 3.25, 500.0]).double()
    text, pooled = texts(config)
    y = run(m, config, x, t, text, pooled, None if pooled is None else SIZES)
    record(out, name, m, y, dout)
    want = {k: p.grad.clone() for k, p in m.named_parameters()}
    m.zero_grad()
    m.float()
    y = run(m, config, x.float(), t.float(), text.float(), None if pooled is None else pooled.float(),
            None if pooled is None else SIZES.float())
    y.backward(dout.float())
    errors = {k: ((p.grad - want[k]).norm() / want[k].norm().clamp_min(0.3)).item() for k, p in m.named_parameters()}
    worst = max(errors, key=errors.get)
    print(f"{name}: PyTorch's gradients in fp32 are at most {errors[worst]:.1e} off ({worst})")


def draw(out, name, scheduler, prediction, steps):
    """With guidance 3 from the first text to the second, of an SD 2."""
    m, text = make(SD2), texts(SD2)[0]
    s = scheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction,
                  timestep_spacing="trailing", **({"clip_sample": False, "set_alpha_to_one": True}
                                                  if scheduler is DDIMScheduler else {"final_sigmas_type": "zero"}))
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64)**2
    s.alphas_cumprod = torch.cumprod(1 - betas, 0)
    if scheduler is DDIMScheduler:
        s.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    s.set_timesteps(steps)
    if scheduler is not DDIMScheduler:  # its noise levels in fp64, too
        a = s.alphas_cumprod[s.timesteps]
        s.sigmas = torch.cat([((1 - a) / a).sqrt(), torch.zeros(1, dtype=torch.float64)])
    x = torch.from_numpy(philox_normal(7, PURPOSE_SAMPLE, 40, 4 * 7 * 9)).reshape(1, 4, 7, 9)
    with torch.no_grad():
        for t in s.timesteps:
            at = torch.tensor([float(t)]).double()
            u, c = run(m, SD2, x, at, text[1:2]), run(m, SD2, x, at, text[0:1])
            x = s.step(u + 3.0 * (c - u), t, x).prev_sample
    out[name] = x.numpy()


def main():
    torch.set_num_threads(1)
    out = {}
    case(out, "sd2", SD2, 7, 9)
    case(out, "sd2_even", SD2, 8, 12)
    case(out, "sdxl", SDXL, 5, 6)
    for prediction, short in (("epsilon", "eps"), ("v_prediction", "v")):
        draw(out, f"draw.ddim.{short}", DDIMScheduler, prediction, 8)
        draw(out, f"draw.dpm.{short}", DPMSolverMultistepScheduler, prediction, 8)
    out = {k: v for k, v in out.items() if not k.startswith("sd2_even.grad.")}
    path = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/unet.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in sorted(out.items())}, path)
    print(path, len(out), "tensors")


if __name__ == "__main__":
    main()
