#!/usr/bin/env python3
"""Makes tests/golden/kohya.safetensors: adapters of tiny SD3 and FLUX.1 transformers in diffusers' layout, and what they are in kohya's.

Per model M: M.whole.MODULE (the shape of a linear's weight), M.ours.MODULE.lora_A|lora_B.weight, M.kohya.NAME (the file that is
expected). Before it is written, what is expected is compared with diffusers: the originals' weights to which the kohya adapter
adds are given to its converters of published files, and must come out as what our adapter adds; for FLUX.1 its converter of
kohya files must give the same. Usage: python3 tests/golden/make_kohya.py [OUT.safetensors]
Needs numpy, torch, safetensors, diffusers 0.42.
"""
import inspect
import os
import sys

import numpy as np
import torch
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from diffusers.loaders.single_file_utils import (convert_flux_transformer_checkpoint_to_diffusers,
                                                 convert_sd3_transformer_checkpoint_to_diffusers)
from safetensors.numpy import save_file

D, R, ALPHA = 4, 2, 3.0
rng = np.random.default_rng(7)


def sd3_linears():
    """(module, original, outputs, inputs), parts of one original in their order."""
    out = []
    for i in range(2):
        last, t, x, c = i == 1, f"transformer_blocks.{i}.", f"joint_blocks.{i}.x_block.", f"joint_blocks.{i}.context_block."
        for a in ("attn", "attn2") if i == 0 else ("attn",):
            out += [(f"{t}{a}.to_{k}", f"{x}{a}.qkv", D, D) for k in "qkv"]
            out += [(f"{t}{a}.to_out.0", f"{x}{a}.proj", D, D)]
        out += [(f"{t}attn.add_{k}_proj", f"{c}attn.qkv", D, D) for k in "qkv"]
        out += [(f"{t}ff.net.0.proj", f"{x}mlp.fc1", 4 * D, D), (f"{t}ff.net.2", f"{x}mlp.fc2", D, 4 * D),
                (f"{t}norm1.linear", f"{x}adaLN_modulation.1", (9 if i == 0 else 6) * D, D),
                (f"{t}norm1_context.linear", f"{c}adaLN_modulation.1", (2 if last else 6) * D, D)]
        if not last:
            out += [(f"{t}attn.to_add_out", f"{c}attn.proj", D, D), (f"{t}ff_context.net.0.proj", f"{c}mlp.fc1", 4 * D, D),
                    (f"{t}ff_context.net.2", f"{c}mlp.fc2", D, 4 * D)]
    e = "time_text_embed."
    return out + [("context_embedder", "context_embedder", D, 3), (e + "timestep_embedder.linear_1", "t_embedder.mlp.0", D, 6),
                  (e + "timestep_embedder.linear_2", "t_embedder.mlp.2", D, D), (e + "text_embedder.linear_1", "y_embedder.mlp.0", D, 5),
                  (e + "text_embedder.linear_2", "y_embedder.mlp.2", D, D), ("norm_out.linear", "final_layer.adaLN_modulation.1", 2 * D, D),
                  ("proj_out", "final_layer.linear", 3, D)]


def flux_linears():
    t, d, s, o = "transformer_blocks.0.", "double_blocks.0.", "single_transformer_blocks.0.", "single_blocks.0."
    out = []
    for x, names, end, ff, norm in (("img", ("to_q", "to_k", "to_v"), "to_out.0", "ff", "norm1"),
                                    ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context", "norm1_context")):
        out += [(f"{t}attn.{k}", f"{d}{x}_attn.qkv", D, D) for k in names]
        out += [(f"{t}attn.{end}", f"{d}{x}_attn.proj", D, D), (f"{t}{ff}.net.0.proj", f"{d}{x}_mlp.0", 4 * D, D),
                (f"{t}{ff}.net.2", f"{d}{x}_mlp.2", D, 4 * D), (f"{t}{norm}.linear", f"{d}{x}_mod.lin", 6 * D, D)]
    out += [(f"{s}attn.to_{k}", f"{o}linear1", D, D) for k in "qkv"]
    out += [(f"{s}proj_mlp", f"{o}linear1", 4 * D, D), (f"{s}proj_out", f"{o}linear2", D, 5 * D), (f"{s}norm.linear", f"{o}modulation.lin", 3 * D, D)]
    e = "time_text_embed."
    for ours, theirs, n in ("timestep", "time_in", 6), ("guidance", "guidance_in", 6), ("text", "vector_in", 5):
        out += [(f"{e}{ours}_embedder.linear_1", f"{theirs}.in_layer", D, n), (f"{e}{ours}_embedder.linear_2", f"{theirs}.out_layer", D, D)]
    return out + [("x_embedder", "img_in", D, 3), ("context_embedder", "txt_in", D, 5),
                  ("norm_out.linear", "final_layer.adaLN_modulation.1", 2 * D, D), ("proj_out", "final_layer.linear", 3, D)]


def adapter(linears, skipped):
    """A, B of every linear but those skipped; small integers, so that products are exact."""
    def whole(*shape):
        return rng.integers(-4, 5, shape).astype(np.float32)
    return {m: (whole(R, k), whole(n, R)) for m, _, n, k in linears if m not in skipped}


def swapped(name, outputs):
    """Whose halves the original has the other way round."""
    return name.startswith("final_layer.adaLN") or (".context_block.adaLN" in name and outputs == 2 * D)


def to_kohya(linears, lora):
    out = {}
    for name in dict.fromkeys(o for _, o, _, _ in linears):
        parts = [(m, n, k) for m, o, n, k in linears if o == name]
        have = [m for m, _, _ in parts if m in lora]
        if not have:
            continue
        rows = sum(n for _, n, _ in parts)
        up, at = np.zeros((rows, R * len(have)), np.float32), 0
        for m, n, _ in parts:
            if m in lora:
                j = have.index(m) * R
                up[at:at + n, j:j + R] = lora[m][1]
            at += n
        if swapped(name, rows):
            up = np.roll(up, rows // 2, 0)
        key = "lora_unet_" + name.replace(".", "_")
        out[key + ".lora_down.weight"] = np.concatenate([lora[m][0] for m in have])
        out[key + ".lora_up.weight"] = up
        out[key + ".alpha"] = np.array(ALPHA * len(have), np.float32)
    return out


def original_deltas(linears, kohya):
    """What the kohya file adds to each weight of the original."""
    out = {}
    for name in dict.fromkeys(o for _, o, _, _ in linears):
        key = "lora_unet_" + name.replace(".", "_")
        parts = [(n, k) for _, o, n, k in linears if o == name]
        out[name + ".weight"] = torch.zeros(sum(n for n, _ in parts), parts[0][1])
        if key + ".alpha" in kohya:
            down, up = (torch.tensor(kohya[f"{key}.lora_{x}.weight"]) for x in ("down", "up"))
            out[name + ".weight"] += float(kohya[key + ".alpha"]) / down.shape[0] * (up @ down)
        out[name + ".bias"] = torch.zeros(out[name + ".weight"].shape[0])
    return out


def check(linears, lora, converted, how):
    for m, _, n, k in linears:
        want = ALPHA / R * (lora[m][1] @ lora[m][0]) if m in lora else np.zeros((n, k), np.float32)
        assert np.array_equal(converted[m + ".weight"].numpy(), want), (how, m)
    print(how, len(linears), "linears agree")


def check_flux_file(linears, lora, back):
    """What diffusers reads of the kohya file. It leaves out alpha of the final layer, which sd-scripts has."""
    for m, original, n, k in linears:
        scale = 1 if original.startswith("final_layer") else ALPHA / R
        want = scale * (lora[m][1] @ lora[m][0]) if m in lora else np.zeros((n, k), np.float32)
        prefix = "transformer." if "transformer_blocks" in m else ""
        a, b = (back.pop(f"{prefix}{m}.lora_{x}.weight").numpy() for x in "AB")
        assert np.array_equal(b @ a, want), m
    assert not back, back.keys()
    print("flux, as a kohya file:", len(linears), "linears agree")


def cut_at_d(convert):
    """diffusers cuts linear1 at the published models' width: here at D."""
    source = inspect.getsource(convert)
    cut = source.replace("inner_dim = 3072", f"inner_dim = {D}").replace("[3072, 3072, 3072, 12288]", f"[{D}, {D}, {D}, {4 * D}]")
    assert cut != source
    space = dict(vars(inspect.getmodule(convert)))
    exec(cut, space)
    return space[convert.__name__]


def main():
    out = {}
    skipped = {"sd3": {"transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_v", "context_embedder"},
               "flux": {"single_transformer_blocks.0.attn.to_k"}}
    for kind, linears in ("sd3", sd3_linears()), ("flux", flux_linears()):
        lora = adapter(linears, skipped[kind])
        kohya = to_kohya(linears, lora)
        deltas = original_deltas(linears, kohya)
        if kind == "sd3":
            deltas.update({"pos_embed": torch.zeros(1, 4, D), "x_embedder.proj.weight": torch.zeros(D, 3, 1, 1), "x_embedder.proj.bias": torch.zeros(D)})
            check(linears, lora, convert_sd3_transformer_checkpoint_to_diffusers(deltas), "sd3, as a published file:")
        else:
            for b in "double_blocks.0.img_attn.norm", "double_blocks.0.txt_attn.norm", "single_blocks.0.norm":
                deltas.update({f"{b}.{x}_norm.scale": torch.zeros(1) for x in ("query", "key")})
            check(linears, lora, cut_at_d(convert_flux_transformer_checkpoint_to_diffusers)(deltas), "flux, as a published file:")
            check_flux_file(linears, lora, cut_at_d(_convert_kohya_flux_lora_to_diffusers)({k: torch.tensor(v) for k, v in kohya.items()}))
        out.update({f"{kind}.whole.{m}": np.zeros((n, k), np.float32) for m, _, n, k in linears})
        for m, (a, b) in lora.items():
            out[f"{kind}.ours.{m}.lora_A.weight"], out[f"{kind}.ours.{m}.lora_B.weight"] = a, b
        out.update({f"{kind}.kohya.{k}": v for k, v in kohya.items()})
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "kohya.safetensors")
    save_file(out, path)
    print(path, len(out), "tensors")


if __name__ == "__main__":
    main()
