#!/usr/bin/env python3
"""Whole nets at full size against PyTorch in fp64: this system's programs and a PyTorch that shares no code
with them get the same random weights and inputs, rounded to bf16 first.

  dit, pixart   DiT-XL/2 (batch 1 and 2) and PixArt-XL/2 (77 and 300 text tokens, of different lengths in a
                batch): the output, and the gradient of every parameter for a random gradient of the output
  vae           Stable Diffusion's autoencoder at 128, 256, 512 pixels: mean and logvar, and the picture
  t5            the encoder of a T5 v1.1 of XXL's width, 4 layers (--t5-layers): 77 and 120 ids, padded

Usage: parity_nets.py BUNDLE [--device cuda|host] [--only dit,pixart,vae,t5] [--tiny] [--t5-layers 4]
                      [--jobs 4] [--work DIR]

The error of a tensor is its distance to fp64 in the 2-norm, relative to fp64's norm. Beside it stands the
error of PyTorch itself in that precision. Must hold, per tensor: fp32 at most 1e-5; bf16 at most 1.2 times
PyTorch's bf16. Told, not failed: tensors above 3e-4 in tf32 and above 1e-2 in bf16. The biases of keys have
no gradient but rounding: they count relative to the tensors' root mean square norm, and have no ratio.
--t5-layers 24 wants --jobs 1: XXL in fp32 has 19 GB. --device host --tiny: small nets on the CPU, to try
the script. Prints one line per net and precision, and
"N passed, M failed"; exits 1 when one failed. Needs torch and numpy.
"""
import argparse
import collections
import concurrent.futures
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F

Precision = collections.namedtuple("Precision", "name device dtype bound hard")
CUDA = [Precision("fp32", "cuda:0", torch.float32, 1e-5, True),
        Precision("tf32", "cuda:0", torch.float32, 3e-4, False),
        Precision("bf16", "cuda:0", torch.bfloat16, 1e-2, False)]
HOST = [Precision("fp32", "host", torch.float32, 1e-5, True), Precision("ref64", "ref64", torch.float32, 1e-6, True)]
RATIO = 1.2


# ---- files ----

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint8: "U8"}
TYPES = {v: k for k, v in NAMES.items()}


def write(path, tensors):
    """safetensors; the same tensor may stand under several names."""
    header, at = {}, 0
    for name, x in tensors.items():
        bytes_ = x.numel() * x.element_size()
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + bytes_]}
        at += bytes_
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            f.write(x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)


def read(path):
    """name -> tensor; the file is mapped, not read."""
    data = np.memmap(path, np.uint8, "c")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:8 + size].tobytes())
    header.pop("__metadata__", None)
    base = torch.from_numpy(data)[8 + size:]
    return {k: base[h["data_offsets"][0]:h["data_offsets"][1]].view(TYPES[h["dtype"]]).reshape(h["shape"])
            for k, h in header.items()}


def write_model(folder, config, tensors, name):
    os.makedirs(folder)
    with open(f"{folder}/config.json", "w") as f:
        json.dump(config, f)
    write(f"{folder}/{name}.safetensors", tensors)


class Random:
    """Uniform numbers in bf16, from a seed."""

    def __init__(self, device, seed):
        self.g = torch.Generator(device).manual_seed(seed)

    def __call__(self, shape, deviation, mean=0.0):
        x = torch.rand(shape, generator=self.g, device=self.g.device) * 2 - 1
        return (x * (deviation * math.sqrt(3)) + mean).bfloat16()


def linear(w, x, name):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


# ---- DiT and PixArt: functions of a dictionary of parameters by diffusers' names ----

Trunk = collections.namedtuple("Trunk", "kind hidden depth heads side text text_dim classes")
PATCH, CHANNELS = 2, 4


def trunk_shapes(c):
    d = c.hidden
    shapes = {"pos_embed.proj.weight": (d, CHANNELS, PATCH, PATCH), "pos_embed.proj.bias": (d,)}

    def add(name, out, inputs):
        shapes.update({f"{name}.weight": (out, inputs), f"{name}.bias": (out,)})

    emb = "transformer_blocks.0.norm1.emb" if c.kind == "dit" else "adaln_single.emb"
    add(f"{emb}.timestep_embedder.linear_1", d, 256)
    add(f"{emb}.timestep_embedder.linear_2", d, d)
    if c.kind == "dit":
        shapes[f"{emb}.class_embedder.embedding_table.weight"] = (c.classes + 1, d)
        add("proj_out_1", 2 * d, d)
    else:
        add("adaln_single.linear", 6 * d, d)
        add("caption_projection.linear_1", d, c.text_dim)
        add("caption_projection.linear_2", d, d)
        shapes["scale_shift_table"] = (2, d)
    add("proj_out_2" if c.kind == "dit" else "proj_out", PATCH * PATCH * CHANNELS, d)
    for i in range(c.depth):
        at = f"transformer_blocks.{i}"
        if c.kind == "dit":
            add(f"{at}.norm1.linear", 6 * d, d)
        else:
            shapes[f"{at}.scale_shift_table"] = (6, d)
        for attention in ("attn1",) if c.kind == "dit" else ("attn1", "attn2"):
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                add(f"{at}.{attention}.{part}", d, d)
        add(f"{at}.ff.net.0.proj", 4 * d, d)
        add(f"{at}.ff.net.2", d, 4 * d)
    return shapes


def trunk_weights(c, random):
    """Nothing is zero: adaLN-Zero's first values would hide every gradient."""
    def deviation(name, shape):
        if "table" in name:
            return 0.3
        if name.endswith("bias"):
            return 0.05
        gain = 0.5 if "norm1.linear" in name or "proj_out_1" in name or "adaln_single.linear" in name else 1
        return gain / math.sqrt(math.prod(shape[1:]))

    return {name: random(shape, deviation(name, shape)) for name, shape in trunk_shapes(c).items()}


def trunk_files(folder, c, w):
    dit = c.kind == "dit"
    config = dict(_class_name="DiTTransformer2DModel" if dit else "PixArtTransformer2DModel",
                  activation_fn="gelu-approximate", attention_bias=True, attention_head_dim=c.hidden // c.heads,
                  in_channels=CHANNELS, norm_elementwise_affine=False, norm_eps=1e-6,
                  norm_type="ada_norm_zero" if dit else "ada_norm_single", num_attention_heads=c.heads,
                  num_layers=c.depth, out_channels=CHANNELS, patch_size=PATCH, sample_size=c.side)
    if dit:
        config["num_embeds_ada_norm"] = c.classes
        first = "transformer_blocks.0.norm1.emb"  # diffusers has it in every block
        w = w | {k.replace(".0.", f".{i}.", 1): v for k, v in w.items() if k.startswith(first)
                 for i in range(1, c.depth)}
    else:
        config.update(caption_channels=c.text_dim, cross_attention_dim=c.hidden, use_additional_conditions=False)
    write_model(folder, config, w, "diffusion_pytorch_model")


def attend(w, name, x, context, heads, mask=None):
    def split(part, of):
        return linear(w, of, f"{name}.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)

    o = F.scaled_dot_product_attention(split("to_q", x), split("to_k", context), split("to_v", context), mask)
    return linear(w, o.transpose(1, 2).flatten(2), f"{name}.to_out.0")


def norm(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def positions(c, like):
    n, quarter = c.side // PATCH, c.hidden // 4
    omega = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    row, column = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    scale = max(c.side // 64, 1) if c.kind == "pixart" else 1
    a = [at.reshape(-1, 1) * omega / scale for at in (column, row)]
    return torch.cat([f(x) for x in a for f in (torch.sin, torch.cos)], 1).to(like)


def timestep(w, c, t, name):
    like = w[f"{name}.linear_1.weight"]
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    i = torch.arange(128, dtype=wide, device=like.device)
    a = t[:, None].to(wide) * torch.exp(-math.log(10000) * i / (128 - (c.kind == "dit")))
    waves = torch.cat([a.cos(), a.sin()], -1).to(like.dtype)
    return linear(w, F.silu(linear(w, waves, f"{name}.linear_1")), f"{name}.linear_2")


def trunk(w, c, x, t, label=None, text=None, text_length=None):
    dit = c.kind == "dit"
    e = timestep(w, c, t, ("transformer_blocks.0.norm1.emb" if dit else "adaln_single.emb") + ".timestep_embedder")
    mask = None
    if dit:
        e = e + w["transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"][label.long()]
    else:
        t6 = linear(w, F.silu(e), "adaln_single.linear").unflatten(-1, (6, -1))
        text = F.gelu(linear(w, text, "caption_projection.linear_1"), approximate="tanh")
        text = linear(w, text, "caption_projection.linear_2")
        mask = (torch.arange(text.shape[1], device=x.device) < text_length[:, None])[:, None, None]
    h = F.conv2d(x, w["pos_embed.proj.weight"], w["pos_embed.proj.bias"], PATCH).flatten(2).transpose(1, 2)
    h = h + positions(c, h)
    for i in range(c.depth):
        at = f"transformer_blocks.{i}"
        mod = linear(w, F.silu(e), f"{at}.norm1.linear").unflatten(-1, (6, -1)) if dit else \
            w[f"{at}.scale_shift_table"] + t6
        shift1, scale1, gate1, shift2, scale2, gate2 = mod[:, :, None].unbind(1)
        y = norm(h, shift1, scale1)
        h = h + gate1 * attend(w, f"{at}.attn1", y, y, c.heads)
        if not dit:
            h = h + attend(w, f"{at}.attn2", h, text, c.heads, mask)
        y = F.gelu(linear(w, norm(h, shift2, scale2), f"{at}.ff.net.0.proj"), approximate="tanh")
        h = h + gate2 * linear(w, y, f"{at}.ff.net.2")
    mod = linear(w, F.silu(e), "proj_out_1").unflatten(-1, (2, -1)) if dit else w["scale_shift_table"] + e[:, None]
    h = linear(w, norm(h, *mod[:, :, None].unbind(1)), "proj_out_2" if dit else "proj_out")
    n = c.side // PATCH
    return h.reshape(-1, n, n, PATCH, PATCH, CHANNELS).permute(0, 5, 1, 3, 2, 4).reshape(-1, CHANNELS, c.side, c.side)


def trunk_inputs(c, batch, random):
    x = {"x": random((batch, CHANNELS, c.side, c.side), 1), "dout": random((batch, CHANNELS, c.side, c.side), 1)}
    x = {k: v.float() for k, v in x.items()} | {"t": torch.tensor([421.0, 999.0][:batch])}
    if c.kind == "dit":
        x["label"] = torch.tensor([c.classes, 2][:batch], dtype=torch.int32)
    else:
        x["text"] = random((batch, c.text, c.text_dim), 1).float()
        x["text_length"] = torch.tensor([c.text // 2 - 1, c.text][-batch:], dtype=torch.int32)
    return x


# ---- AutoencoderKL ----

def conv(w, x, name, stride=1):
    k = w[f"{name}.weight"].shape[-1] // 2
    if stride == 2:
        x, k = F.pad(x, (0, 1, 0, 1)), 0
    return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride, k)


def group_norm(w, x, name):
    return F.group_norm(x, 32, w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def resnet(w, x, name):
    h = conv(w, F.silu(group_norm(w, x, f"{name}.norm1")), f"{name}.conv1")
    h = conv(w, F.silu(group_norm(w, h, f"{name}.norm2")), f"{name}.conv2")
    return h + (conv(w, x, f"{name}.conv_shortcut") if f"{name}.conv_shortcut.weight" in w else x)


def middle(w, x, name):
    x = resnet(w, x, f"{name}.mid_block.resnets.0")
    y = group_norm(w, x, f"{name}.mid_block.attentions.0.group_norm").flatten(2).transpose(1, 2)
    y = attend(w, f"{name}.mid_block.attentions.0", y, y, 1)
    return resnet(w, x + y.transpose(1, 2).reshape(x.shape), f"{name}.mid_block.resnets.1")


def encode(w, c, pixels):
    like = w["quant_conv.weight"]
    x = conv(w, pixels.to(like.dtype) / 127.5 - 1, "encoder.conv_in")
    for i in range(len(c["channels"])):
        for j in range(c["layers"]):
            x = resnet(w, x, f"encoder.down_blocks.{i}.resnets.{j}")
        if i < len(c["channels"]) - 1:
            x = conv(w, x, f"encoder.down_blocks.{i}.downsamplers.0.conv", 2)
    x = conv(w, F.silu(group_norm(w, middle(w, x, "encoder"), "encoder.conv_norm_out")), "encoder.conv_out")
    mean, logvar = conv(w, x, "quant_conv").chunk(2, 1)
    return {"latent_mean": mean, "latent_logvar": logvar.clamp(-30, 20)}


def decode(w, c, latent):
    x = middle(w, conv(w, conv(w, latent, "post_quant_conv"), "decoder.conv_in"), "decoder")
    for i in range(len(c["channels"])):
        for j in range(c["layers"] + 1):
            x = resnet(w, x, f"decoder.up_blocks.{i}.resnets.{j}")
        if i < len(c["channels"]) - 1:
            x = conv(w, F.interpolate(x, scale_factor=2.0), f"decoder.up_blocks.{i}.upsamplers.0.conv")
    return {"decoded": conv(w, F.silu(group_norm(w, x, "decoder.conv_norm_out")), "decoder.conv_out")}


def vae_shapes(c):
    shapes = {}

    def add(name, *shape):
        shapes.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    def add_resnet(name, i, o):
        add(f"{name}.norm1", i)
        add(f"{name}.conv1", o, i, 3, 3)
        add(f"{name}.norm2", o)
        add(f"{name}.conv2", o, o, 3, 3)
        if i != o:
            add(f"{name}.conv_shortcut", o, i, 1, 1)

    last = c["channels"][-1]
    for half, widths, layers, down in (("encoder", c["channels"], c["layers"], True),
                                       ("decoder", c["channels"][::-1], c["layers"] + 1, False)):
        add(f"{half}.conv_in", widths[0], 3 if down else 4, 3, 3)
        width = widths[0]
        for i, o in enumerate(widths):
            block = f"{half}.{'down' if down else 'up'}_blocks.{i}"
            for j in range(layers):
                add_resnet(f"{block}.resnets.{j}", width, o)
                width = o
            if i < len(widths) - 1:
                add(f"{block}.{'down' if down else 'up'}samplers.0.conv", o, o, 3, 3)
        add(f"{half}.mid_block.attentions.0.group_norm", last)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            add(f"{half}.mid_block.attentions.0.{part}", last, last)
        for j in range(2):
            add_resnet(f"{half}.mid_block.resnets.{j}", last, last)
        add(f"{half}.conv_norm_out", width)
        add(f"{half}.conv_out", 8 if down else 3, width, 3, 3)
    add("quant_conv", 8, 8, 1, 1)
    add("post_quant_conv", 4, 4, 1, 1)
    return shapes


def vae_files(folder, c, random):
    w = {}
    for name, shape in vae_shapes(c).items():
        if len(shape) > 1:
            w[name] = random(shape, 1 / math.sqrt(math.prod(shape[1:])))
        else:  # of a norm, or a bias
            w[name] = random(shape, 0.1, 0.0 if name.endswith("bias") else 1.0)
    write_model(folder, dict(_class_name="AutoencoderKL", act_fn="silu", block_out_channels=c["channels"],
                             in_channels=3, out_channels=3, latent_channels=4, layers_per_block=c["layers"],
                             norm_num_groups=32, scaling_factor=0.18215), w, "diffusion_pytorch_model")
    return w


# ---- T5 v1.1's encoder ----

def rms_norm(x, weight):
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def position_bias(table, length):
    """(heads, L, L); the paper's buckets: half for each side, half of these exact, the rest logarithmic."""
    at = torch.arange(length, device=table.device)
    far = at[None] - at[:, None]
    n, half, exact = far.abs(), 16, 8
    wide = exact + (torch.log(n.clamp(min=1).float() / exact) / math.log(128 / exact) * (half - exact)).long()
    bucket = (far > 0) * half + torch.where(n < exact, n, wide.clamp(max=half - 1))
    return table[bucket].permute(2, 0, 1)


def t5(w, c, ids, cast):
    """cast: brings a parameter to the precision; layer by layer, so that fp64 needs memory for one."""
    x = cast(w["shared.weight"])[ids.long()]
    bias = position_bias(cast(w["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]), ids.shape[1])
    mask = bias[None].masked_fill((ids == 0)[:, None, None], -math.inf)
    for i in range(c["layers"]):
        at = f"encoder.block.{i}.layer"
        y = rms_norm(x, cast(w[f"{at}.0.layer_norm.weight"]))
        q, k, v = (F.linear(y, cast(w[f"{at}.0.SelfAttention.{n}.weight"])).unflatten(-1, (c["heads"], -1)).transpose(1, 2)
                   for n in "qkv")
        o = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0).transpose(1, 2).flatten(2)
        x = x + F.linear(o, cast(w[f"{at}.0.SelfAttention.o.weight"]))
        y = rms_norm(x, cast(w[f"{at}.1.layer_norm.weight"]))
        ff = f"{at}.1.DenseReluDense"
        y = F.gelu(F.linear(y, cast(w[f"{ff}.wi_0.weight"])), approximate="tanh") * F.linear(y, cast(w[f"{ff}.wi_1.weight"]))
        x = x + F.linear(y, cast(w[f"{ff}.wo.weight"]))
    return {"text_hidden": rms_norm(x, cast(w["encoder.final_layer_norm.weight"]))}


def t5_files(folder, c, random):
    d, inner, w = c["d"], c["heads"] * c["d_kv"], {"shared.weight": random((c["vocab"], c["d"]), 1)}
    for i in range(c["layers"]):
        at = f"encoder.block.{i}.layer"
        if i == 0:
            w[f"{at}.0.SelfAttention.relative_attention_bias.weight"] = random((32, c["heads"]), 0.5)
        for n, deviation in (("q", 1 / math.sqrt(d * c["d_kv"])), ("k", 1 / math.sqrt(d)), ("v", 1 / math.sqrt(d))):
            w[f"{at}.0.SelfAttention.{n}.weight"] = random((inner, d), deviation)
        w[f"{at}.0.SelfAttention.o.weight"] = random((d, inner), 1 / math.sqrt(inner))
        for n in ("wi_0", "wi_1"):
            w[f"{at}.1.DenseReluDense.{n}.weight"] = random((c["ff"], d), 1 / math.sqrt(d))
        w[f"{at}.1.DenseReluDense.wo.weight"] = random((d, c["ff"]), 1 / math.sqrt(c["ff"]))
        for n in range(2):
            w[f"{at}.{n}.layer_norm.weight"] = random((d,), 0.1, 1.0)
    w["encoder.final_layer_norm.weight"] = random((d,), 0.1, 1.0)
    write_model(folder, dict(model_type="t5", d_model=d, d_kv=c["d_kv"], d_ff=c["ff"], num_heads=c["heads"],
                             num_layers=c["layers"], vocab_size=c["vocab"], feed_forward_proj="gated-gelu",
                             dense_act_fn="gelu_new", layer_norm_epsilon=1e-6, relative_attention_num_buckets=32,
                             relative_attention_max_distance=128), w, "model")
    return w


# ---- cases ----

class Case:
    """One net and one input: what our program is called with, and the PyTorch function."""

    def __init__(self, name, model, inputs, command, theirs):
        self.name, self.model, self.inputs, self.command, self.theirs = name, model, inputs, command, theirs
        self.runs = {}


def trunk_case(c, name, folder, w, batch, random):
    inputs = trunk_inputs(c, batch, random)

    def theirs(dtype, device):
        p = {k: v.to(dtype).requires_grad_() for k, v in w.items()}
        x = {k: v.to(device) for k, v in inputs.items()}
        x = {k: v.to(dtype) if k in ("x", "text", "dout") else v for k, v in x.items()}
        dout = x.pop("dout")
        out = trunk(p, c, **x)
        grads = torch.autograd.grad(out, list(p.values()), dout)
        return {"out": out.detach()} | {f"grad.{k}": g for k, g in zip(p, grads)}

    return Case(name, folder, inputs, lambda model, i, o, p: ["lg-forward", model, i, o, p.device] +
                ([p.name] if p.device == "cuda:0" else []), theirs)


def encoder_case(name, folder, inputs, words, function):
    def command(model, i, o, p):
        precision = ["--precision", p.name] if p.device == "cuda:0" else []
        batch = str(next(iter(inputs.values())).shape[0])
        return ["lg-encode", *words, "--model", model, "--device", p.device, *precision, "--batch", batch, i, o]

    def theirs(dtype, device):
        with torch.no_grad():
            return function(dtype, {k: v.to(device) for k, v in inputs.items()})

    return Case(name, folder, inputs, command, theirs)


def trunk_cases(kind, a, work, random):
    xl, out, w = not a.tiny, [], None
    size = (1152, 28, 16, 32) if xl else (64, 2, 4, 8)
    if kind == "dit":
        c = Trunk("dit", *size, 0, 0, 1000 if xl else 5)
        w = trunk_weights(c, random)
        trunk_files(f"{work}/dit", c, w)
        return [trunk_case(c, f"DiT {size[1]} x {size[0]}, batch {b}", f"{work}/dit", w, b, random) for b in (2, 1)]
    for text in (77, 300):
        c = Trunk("pixart", *size, text, 4096 if xl else 48, 0)
        if not w:
            w = trunk_weights(c, random)
            trunk_files(f"{work}/pixart", c, w)
        out.append(trunk_case(c, f"PixArt {size[1]} x {size[0]}, {text} tokens", f"{work}/pixart", w, 2, random))
    return out


def vae_cases(a, work, random):
    c = dict(channels=[32, 32, 64, 64], layers=1) if a.tiny else dict(channels=[128, 256, 512, 512], layers=2)
    w, out, g = vae_files(f"{work}/vae", c, random), [], torch.Generator().manual_seed(3)

    def function(half, key):
        return lambda dtype, x: half({k: v.to(dtype) for k, v in w.items()}, c,
                                     x[key] if key == "pixels" else x[key].to(dtype))

    for side in (32, 64) if a.tiny else (128, 256, 512):
        n = 1 if side == 512 else 2
        pixels = torch.randint(0, 256, (n, 3, side, side), generator=g, dtype=torch.uint8)
        latent = random((n, 4, side // 8, side // 8), 1).float()
        out.append(encoder_case(f"VAE encoder, {side} px", f"{work}/vae", {"pixels": pixels}, ["vae"],
                                function(encode, "pixels")))
        out.append(encoder_case(f"VAE decoder, {side} px", f"{work}/vae", {"latent_mean": latent}, ["decode", "vae"],
                                function(decode, "latent_mean")))
    return out


def t5_cases(a, work, random):
    c = dict(d=64, d_kv=16, ff=128, heads=4, layers=2, vocab=256) if a.tiny else \
        dict(d=4096, d_kv=64, ff=10240, heads=64, layers=a.t5_layers, vocab=2048)
    w, out, g = t5_files(f"{work}/t5", c, random), [], torch.Generator().manual_seed(4)
    for length in (77, 120):
        ids = torch.randint(1, c["vocab"], (3, length), generator=g, dtype=torch.int32)
        for i, n in enumerate((length, 5, length // 2)):
            ids[i, n:] = 0
        out.append(encoder_case(f"T5 {c['layers']} x {c['d']}, {length} ids", f"{work}/t5", {"token_ids": ids}, ["text"],
                                lambda dtype, x: t5(w, c, x["token_ids"], lambda v: v.to(dtype))))
    return out


# ---- both sides, compared ----

def ours(a, work, case, number, precision):
    """Runs our program; the path of its output."""
    at = f"{work}/{number}.{precision.name}"
    env = dict(os.environ, LG_CUDA_CACHE=f"{at}.algorithms")
    command = case.command(case.model, f"{work}/{number}.in.safetensors", f"{at}.safetensors", precision)
    command[0] = f"{a.bundle}/bin/{command[0]}"
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr.strip()}")
    return f"{at}.safetensors"


def distances(got, want, norms, floor):
    """name -> relative error. No gradient but rounding, for biases of keys: relative to `floor`."""
    out = {}
    for name, x in want.items():
        y = got[name].to(x.device)
        assert y.shape == x.shape, (name, y.shape, x.shape)
        scale = floor if name.endswith("to_k.bias") else norms[name]
        error = float((y.double() - x).norm()) / scale
        out[name] = error if math.isfinite(error) else math.inf
    return out


def short(name):
    return name.removeprefix("grad.").replace("transformer_blocks.", "")


def judge(case, p, mine, theirs):
    """Prints the line; how many tensors passed and failed."""
    worst = max(mine, key=mine.get)
    above = sum(e > p.bound for e in mine.values())
    bad = {k: f"error {e:.2e}" for k, e in mine.items() if not e <= p.bound} if p.hard else {}
    line = f"{case.name:26} {p.name:5} {len(mine):4} tensors  "
    if len(mine) > 2:
        rms = math.sqrt(sum(e * e for e in mine.values()) / len(mine))
        line += f"out {mine['out']:.2e}  rms {rms:.2e}  "
    line += f"largest {mine[worst]:.2e} {short(worst)} (PyTorch's {theirs[worst]:.2e}, largest {max(theirs.values()):.2e})"
    if above:
        line += f"; {above} above {p.bound:g}"
    if p.name == "bf16":
        ratio = {k: mine[k] / theirs[k] for k in mine if not k.endswith("to_k.bias")}
        bad |= {k: f"{r:.2f} times PyTorch's bf16 error {theirs[k]:.2e}" for k, r in ratio.items() if not r <= RATIO}
        at = max(ratio, key=ratio.get)
        line += f"; over PyTorch's: median {sorted(ratio.values())[len(ratio) // 2]:.2f}, largest {ratio[at]:.2f} {short(at)}"
    print(("FAIL " if bad else "ok   ") + line)
    for name in sorted(bad, key=lambda k: -mine[k])[:4]:
        print(f"     {short(name)}: {bad[name]}")
    sys.stdout.flush()
    return len(mine) - len(bad), len(bad)


def check(a, case, precisions, device):
    want = {k: v.double() for k, v in case.theirs(torch.float64, device).items()}
    norms = {k: float(v.norm()) for k, v in want.items()}
    grads = [v for k, v in norms.items() if k != "out"]
    floor = math.sqrt(sum(v * v for v in grads) / max(len(grads), 1))
    passed = failed = 0
    for p in precisions:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = p.name == "tf32"
        theirs = distances(case.theirs(p.dtype, device), want, norms, floor)
        try:
            path = case.runs[p.name].result()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"FAIL {case.name} {p.name}: {error}")
            failed += 1
            continue
        good, bad = judge(case, p, distances(read(path), want, norms, floor), theirs)
        os.unlink(path)
        passed, failed = passed + good, failed + bad
    return passed, failed


def run(a, work):
    device, began = torch.device(a.device if a.device == "cuda" else "cpu"), time.monotonic()
    precisions = CUDA if a.device == "cuda" else HOST
    make = {"dit": lambda r: trunk_cases("dit", a, work, r), "pixart": lambda r: trunk_cases("pixart", a, work, r),
            "vae": lambda r: vae_cases(a, work, r), "t5": lambda r: t5_cases(a, work, r)}
    cases, passed, failed = [], 0, 0
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        for number, kind in enumerate(a.only):
            made = make[kind](Random(device, number))
            for case in made:
                at = len(cases)
                write(f"{work}/{at}.in.safetensors", case.inputs)
                case.runs = {p.name: pool.submit(ours, a, work, case, at, p) for p in precisions}
                cases.append(case)
        for i, case in enumerate(cases):
            good, bad = check(a, case, precisions, device)
            passed, failed = passed + good, failed + bad
            cases[i] = case = None  # its weights may go
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"PyTorch {torch.__version__} on {device}, {time.monotonic() - began:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return failed == 0 and passed > 0


def main():
    kinds = ["dit", "pixart", "vae", "t5"]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bundle")
    p.add_argument("--device", default="cuda", choices=["cuda", "host"])
    p.add_argument("--only", default=",".join(kinds))
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--t5-layers", type=int, default=4)
    p.add_argument("--jobs", type=int, default=4, help="of our programs at once")
    p.add_argument("--work", help="keep the files there; default: a temporary folder, in memory if it fits")
    a = p.parse_args()
    a.bundle, a.only = os.path.abspath(a.bundle), a.only.split(",")
    if set(a.only) - set(kinds):
        p.error(f"--only: {', '.join(kinds)}")
    shm = "/dev/shm"
    memory = os.path.isdir(shm) and shutil.disk_usage(shm).free > (1 if a.tiny else 32) << 30
    work = os.path.abspath(a.work) if a.work else tempfile.mkdtemp(prefix="lgt.", dir=shm if memory else None)
    os.makedirs(work, exist_ok=True)
    try:
        well = run(a, work)
    finally:
        if not a.work:
            shutil.rmtree(work)
    sys.exit(0 if well else 1)


main()
