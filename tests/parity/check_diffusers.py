#!/usr/bin/env python3
"""Loads a model folder with diffusers' own class and compares its output with ours.

Usage: tests/parity/check_diffusers.py DIR [--forward build/bin/lg-forward] [--ours OUT.safetensors]
                                           [--tolerance 1e-4]

DIR is a checkpoint (its model/ and ema/ are both checked) or a folder with config.json and
diffusion_pytorch_model.safetensors, or an adapter's (adapter/ of a checkpoint), which diffusers loads into the model that it
names. The inputs are random from a fixed seed. Our side is computed by
lg-forward; with --ours it is read from a file that lg-forward has written for these inputs before
(--inputs FILE writes them and ends). Exits 0 when the relative error (2-norm) is at most the
tolerance. Needs torch, diffusers, safetensors.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from diffusers import (DiTTransformer2DModel, FluxPipeline, FluxTransformer2DModel,
                       PixArtTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel)
from safetensors.torch import load_file, save_file

BATCH = 3


def inputs(config):
    g = torch.Generator().manual_seed(1234)
    if "Flux" in config["_class_name"]:
        return flux_inputs(config, g)
    if "SD3" in config["_class_name"]:
        return sd3_inputs(config, g)
    if "UNet" in config["_class_name"]:
        return unet_inputs(config, g)
    side, dit = config["sample_size"], "DiT" in config["_class_name"]
    x = {"x": torch.randn(BATCH, config["in_channels"], side, config.get("_sample_width", side),
                          generator=g)}
    if dit:
        classes = config["num_embeds_ada_norm"]
        x["t"] = torch.tensor([999.0, 500.0, 3.0])
        x["label"] = torch.tensor([0, classes, classes // 2], dtype=torch.int32)
    else:
        length = config.get("_text_length", 120)
        x["t"] = torch.tensor([987.5, 500.0, 3.25])
        x["text"] = torch.randn(BATCH, length, config["caption_channels"], generator=g)
        x["text_length"] = torch.tensor([length, 1, (length + 1) // 2], dtype=torch.int32)
    return x


def flux_inputs(config, g):
    """t and guidance are a thousand times what diffusers' net is given."""
    side = config.get("_sample_height", config.get("sample_size", 128))
    x = {"x": torch.randn(BATCH, config["in_channels"] // 4, side, config.get("_sample_width", side),
                          generator=g),
         "t": torch.tensor([987.5, 500.0, 3.25]),
         "pooled.clip_l": torch.randn(BATCH, config["pooled_projection_dim"], generator=g),
         "text.t5": torch.randn(BATCH, config.get("_text_length", 512),
                                config["joint_attention_dim"], generator=g)}
    if config["guidance_embeds"]:
        x["guidance"] = torch.tensor([3500.0, 1000.0, 0.0])
    return x


def unet_inputs(config, g):
    """SDXL's two texts apart, as our net is given them."""
    side, width = config.get("_sample_height", config["sample_size"]), config["cross_attention_dim"]
    length = config.get("_text_length", 77)
    x = {"x": torch.randn(BATCH, config["in_channels"], side, config.get("_sample_width", side), generator=g),
         "t": torch.tensor([987.5, 500.0, 3.25])}
    if config.get("addition_embed_type") != "text_time":
        x["text"] = torch.randn(BATCH, length, width, generator=g)
        return x
    first = config.get("_text_widths", 768 if width == 2048 else width // 2)
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    x["text.clip_l"] = torch.randn(BATCH, length, first, generator=g)
    x["text.clip_g"] = torch.randn(BATCH, length, width - first, generator=g)
    x["pooled.clip_g"] = torch.randn(BATCH, pooled, generator=g)
    x["size"] = torch.tensor([1024., 768, 0, 96, 512, 512, 333, 517, 40, 0, 768, 512, 64, 4096, 7, 1, 1024, 1024])
    return x


def sd3_inputs(config, g):
    """The texts apart, as our net is given them: lengths and widths by its own keys, else those of the published models."""
    side = config.get("_sample_height", config.get("sample_size", 128))
    pooled = config["pooled_projection_dim"]
    first = 768 if pooled == 2048 else pooled // 2
    lengths = config.get("_text_lengths", [77, 77, 256])
    widths = config.get("_text_widths", [first, pooled - first, config["joint_attention_dim"]])
    pools = config.get("_text_pooled", [first, pooled - first, 0])
    x = {"x": torch.randn(BATCH, config["in_channels"], side, config.get("_sample_width", side),
                          generator=g),
         "t": torch.tensor([987.5, 500.0, 3.25])}
    for name, length, width, pool in zip(("clip_l", "clip_g", "t5"), lengths, widths, pools):
        x[f"text.{name}"] = torch.randn(BATCH, length, width, generator=g)
        if pool:
            x[f"pooled.{name}"] = torch.randn(BATCH, pool, generator=g)
    return x


def loaded(cls, folder, adapter):
    """An adapter by its own file and scale."""
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    bad = {k: v for k, v in info.items() if v}
    assert not bad, f"diffusers complains about {folder}: {bad}"
    if adapter:
        model.load_lora_adapter(adapter, prefix="unet" if cls is UNet2DConditionModel else "transformer",
                                weight_name="pytorch_lora_weights.safetensors")
    return model.eval()


def sd3(model, x):
    """The texts put together as its pipeline does."""
    clip = torch.cat([x["text.clip_l"], x["text.clip_g"]], -1)
    clip = torch.nn.functional.pad(clip, (0, x["text.t5"].shape[-1] - clip.shape[-1]))
    with torch.no_grad():
        return model(x["x"], encoder_hidden_states=torch.cat([clip, x["text.t5"]], -2), timestep=x["t"],
                     pooled_projections=torch.cat([x["pooled.clip_l"], x["pooled.clip_g"]], -1)).sample


def flux(model, x):
    """As its pipeline packs the latent and calls the net."""
    b, c, h, w = x["x"].shape
    rows, columns = torch.meshgrid(torch.arange(h // 2.0), torch.arange(w // 2.0), indexing="ij")
    with torch.no_grad():
        y = model(
            FluxPipeline._pack_latents(x["x"], b, c, h, w), encoder_hidden_states=x["text.t5"],
            pooled_projections=x["pooled.clip_l"], timestep=x["t"] / 1000,
            img_ids=torch.stack([0 * rows, rows, columns], -1).reshape(-1, 3),
            txt_ids=torch.zeros(x["text.t5"].shape[1], 3),
            guidance=x["guidance"] / 1000 if "guidance" in x else None).sample
    return FluxPipeline._unpack_latents(y, h * 8, w * 8, 8)


def unet(model, x):
    more = {"text_embeds": x["pooled.clip_g"], "time_ids": x["size"].reshape(BATCH, 6)} if "size" in x else None
    text = torch.cat([x["text.clip_l"], x["text.clip_g"]], -1) if "size" in x else x["text"]
    with torch.no_grad():
        return model(x["x"], x["t"], encoder_hidden_states=text, added_cond_kwargs=more).sample


def theirs(folder, adapter, config, x):
    if "UNet" in config["_class_name"]:
        return unet(loaded(UNet2DConditionModel, folder, adapter), x)
    if "Flux" in config["_class_name"]:
        return flux(loaded(FluxTransformer2DModel, folder, adapter), x)
    if "SD3" in config["_class_name"]:
        return sd3(loaded(SD3Transformer2DModel, folder, adapter), x)
    cls = DiTTransformer2DModel if "DiT" in config["_class_name"] else PixArtTransformer2DModel
    model = loaded(cls, folder, adapter)
    with torch.no_grad():
        if "label" in x:
            return model(x["x"], timestep=x["t"], class_labels=x["label"].long()).sample
        mask = torch.arange(x["text"].shape[1])[None] < x["text_length"][:, None]
        return model(x["x"], encoder_hidden_states=x["text"], timestep=x["t"],
                     encoder_attention_mask=mask).sample


def ours(folder, x, forward):
    with tempfile.TemporaryDirectory() as tmp:
        save_file(x, f"{tmp}/in.safetensors")
        subprocess.run([forward, folder, f"{tmp}/in.safetensors", f"{tmp}/out.safetensors"],
                       check=True)
        return load_file(f"{tmp}/out.safetensors")["out"]


def check(folder, args):
    model = folder
    if os.path.exists(f"{folder}/adapter_config.json"):
        model = json.load(open(f"{folder}/adapter_config.json"))["base_model_name_or_path"]
    config = json.load(open(f"{model}/config.json"))
    x = inputs(config)
    if args.inputs:
        save_file(x, args.inputs)
        return True
    a = theirs(model, folder if model != folder else None, config, x)
    b = load_file(args.ours)["out"] if args.ours else ours(folder, x, args.forward)
    error = ((a - b).norm() / a.norm().clamp_min(1e-12)).item()
    good = error <= args.tolerance
    print(f"{folder}: relative error {error:.2e} (norm {a.norm().item():.3g})",
          "ok" if good else f"more than {args.tolerance}")
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("dir")
    p.add_argument("--forward", default="build/bin/lg-forward")
    p.add_argument("--ours")
    p.add_argument("--inputs")
    p.add_argument("--tolerance", type=float, default=1e-4)
    args = p.parse_args()
    is_model = any(os.path.exists(f"{args.dir}/{name}.json") for name in ("config", "adapter_config"))
    folders = [args.dir] if is_model else [
        f"{args.dir}/{k}" for k in ("model", "ema") if os.path.isdir(f"{args.dir}/{k}")]
    if not folders:
        sys.exit(f"{args.dir}: neither a model nor a checkpoint")
    sys.exit(0 if all([check(f, args) for f in folders]) else 1)


main()
