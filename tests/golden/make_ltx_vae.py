#!/usr/bin/env python3
"""Small AutoencoderKLLTXVideo with random weights and what diffusers computes with them in fp64.

    python3 tests/golden/make_ltx_vae.py [OUT=tests/golden/encoders]

needs torch, diffusers, safetensors; used by tests/unit/test_ltx_vae.c. Each folder is a model as diffusers lays it out;
golden.safetensors has, for clips of 1, 9 and 17 frames, pixels, the posterior's mean and log-variance without the latents'
statistics, and the picture that the mean is decoded to.

  ltx_090  widths 4, 8, 12: stride-2 convolutions, a resnet that widens, a block that keeps its size, a decoder of other
           widths whose blocks widen; fp32
  ltx_091  a decoder that adds noise (Philox DECODE, seed 5, of each clip its number) and is given timestep 0.05; fp32
  ltx_095  widths 4, 8, 16, 32: boxes in space, in time, in both; a decoder with residuals that gets narrower and is given
           a timestep; bf16
  ltx_old  4 blocks, without the keys that 0.9.0's file lacks, a causal decoder of a block less; fp16
"""
import json
import os
import sys

import numpy as np
import torch
from diffusers import AutoencoderKLLTXVideo
from safetensors.torch import save_file

from diffusers.models import embeddings, normalization

sys.path.insert(0, os.path.dirname(__file__))
of_diffusers = normalization.RMSNorm.forward, embeddings.get_timestep_embedding
from make_denoiser import philox_normal, timestep_embedding_f64  # noqa: E402

normalization.RMSNorm.forward = of_diffusers[0]  # its own here; the norms of this model have no weight
embeddings.get_timestep_embedding = timestep_embedding_f64

torch.set_grad_enabled(False)
OUT = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/encoders"


def randomize(model, seed):
    """Every parameter away from its special initial value, activations of order 1."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if p.dim() == 1:
            p.copy_((1.0 if name.endswith("weight") else 0.0) + 0.2 * noise)
        elif (p.dim() == 2 and "scale_shift_table" in name) or "per_channel_scale" in name:
            p.copy_(0.2 * noise)
        elif p.dim() > 1:
            p.copy_(noise / p[0].numel() ** 0.5)
    c = model.latents_mean.numel()
    model.latents_mean.copy_(0.3 * torch.randn(c, generator=g))
    model.latents_std.copy_(0.5 + torch.rand(c, generator=g))


PURPOSE_DECODE = 14


def decode_with_noise(model, latent, timestep):
    """Clip by clip, the noise of each from its own stream, in the order in which the decoder asks for it."""
    randn, out = torch.randn, []
    for i, z in enumerate(latent):
        stream = torch.from_numpy(philox_normal(5, PURPOSE_DECODE, i, 1 << 14))
        at = 0

        def given(shape, **kwargs):
            nonlocal at
            at += int(np.prod(shape))
            return stream[at - int(np.prod(shape)):at].reshape(shape)

        torch.randn = given
        try:
            out.append(model.decode(z[None], torch.tensor([timestep], dtype=torch.float64)).sample)
        finally:
            torch.randn = randn
        assert 0 < at <= len(stream)
    return torch.cat(out)


def ltx(name, dtype, seed, sizes, drop=(), **kwargs):
    path = f"{OUT}/{name}"
    os.makedirs(path, exist_ok=True)
    model = AutoencoderKLLTXVideo(**kwargs).eval()
    randomize(model, seed)
    state = {k: v.to(dtype).contiguous() for k, v in model.state_dict().items()}
    save_file(state, f"{path}/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.items() if not k.startswith("_") and k not in drop}
    assert not drop or all(AutoencoderKLLTXVideo(**{k: v for k, v in config.items()}).config[k] == model.config[k]
                           for k in drop), "what is left out has another default"
    config["_class_name"] = "AutoencoderKLLTXVideo"
    with open(f"{path}/config.json", "w") as f:
        json.dump(config, f, indent=1, sort_keys=True)
        f.write("\n")

    reference = AutoencoderKLLTXVideo(**kwargs).double().eval()
    reference.load_state_dict({k: v.double() for k, v in state.items()})
    shape = (1, -1, 1, 1, 1)
    mean, std = reference.latents_mean.view(shape), reference.latents_std.view(shape)
    g = torch.Generator().manual_seed(seed + 1)
    golden = {}
    for frames, height, width in sizes:
        pixels = torch.randint(0, 256, (2, 3, frames, height, width), generator=g, dtype=torch.uint8)
        posterior = reference.encode(pixels.double() / 127.5 - 1).latent_dist
        z = (posterior.mean - mean) / std
        temb = torch.zeros(2, dtype=torch.float64) if reference.config.timestep_conditioning else None
        golden[f"pixels.{frames}"] = pixels
        golden[f"mean.{frames}"] = z.float().contiguous()
        golden[f"logvar.{frames}"] = (posterior.logvar - 2 * std.log()).float().contiguous()
        latent = z.float().double() * std + mean
        decoded = decode_with_noise(reference, latent, 0.05) if any(kwargs.get("decoder_inject_noise", ())) else \
            reference.decode(latent, temb).sample
        golden[f"decoded.{frames}"] = decoded.float().contiguous()
    save_file(golden, f"{path}/golden.safetensors")


COMMON = dict(latent_channels=6, patch_size=2)
ltx("ltx_090", torch.float32, 11, ((1, 24, 16), (9, 8, 24), (17, 16, 8)), **COMMON,
    block_out_channels=(4, 8, 12), down_block_types=("LTXVideoDownBlock3D",) * 3,
    layers_per_block=(2, 1, 1, 2), spatio_temporal_scaling=(True, True, False),
    decoder_block_out_channels=(4, 12, 8), decoder_layers_per_block=(1, 2, 1, 1),
    decoder_spatio_temporal_scaling=(True, True, False), decoder_inject_noise=(False,) * 4,
    downsample_type=("conv",) * 3, upsample_residual=(False,) * 3, upsample_factor=(1,) * 3)
ltx("ltx_091", torch.float32, 14, ((1, 24, 16), (9, 8, 24)), **COMMON,
    block_out_channels=(4, 8, 12), down_block_types=("LTXVideoDownBlock3D",) * 3,
    layers_per_block=(1, 1, 1, 1), spatio_temporal_scaling=(True, True, False),
    decoder_block_out_channels=(8, 16), decoder_layers_per_block=(1, 2, 1),
    decoder_spatio_temporal_scaling=(True, True), decoder_inject_noise=(True, False, True),
    downsample_type=("conv",) * 3, upsample_residual=(True, True), upsample_factor=(2, 2),
    timestep_conditioning=True)
ltx("ltx_095", torch.bfloat16, 12, ((1, 24, 16), (9, 16, 8), (17, 8, 24)), **COMMON,
    block_out_channels=(4, 8, 16, 32), down_block_types=("LTXVideo095DownBlock3D",) * 3,
    layers_per_block=(1, 2, 1, 1), spatio_temporal_scaling=(True, True, True),
    decoder_block_out_channels=(8, 16), decoder_layers_per_block=(1, 1, 2),
    decoder_spatio_temporal_scaling=(True, True), decoder_inject_noise=(False,) * 3,
    downsample_type=("spatial", "temporal", "spatiotemporal"), upsample_residual=(True, True),
    upsample_factor=(2, 2), timestep_conditioning=True)
ltx("ltx_old", torch.float16, 13, ((1, 24, 16), (9, 16, 32)), drop=(
        "down_block_types", "decoder_inject_noise", "downsample_type", "upsample_residual",
        "upsample_factor", "timestep_conditioning", "spatial_compression_ratio",
        "temporal_compression_ratio", "spatio_temporal_scaling", "decoder_spatio_temporal_scaling"),
    latent_channels=3, patch_size=1, block_out_channels=(4, 4, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
    decoder_block_out_channels=(4, 4, 4, 8), decoder_layers_per_block=(1, 1, 1, 1, 1),
    decoder_causal=True)
for name in sorted(n for n in os.listdir(OUT) if n.startswith("ltx_")):
    bytes_ = sum(os.path.getsize(f"{OUT}/{name}/{f}") for f in os.listdir(f"{OUT}/{name}"))
    print(f"{name}: {bytes_} bytes")
