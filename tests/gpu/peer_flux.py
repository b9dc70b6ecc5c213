"""FLUX's blocks of two streams and of one for parity_nets.py, in PyTorch: see peer_nets.py."""
import collections
import math

import torch
import torch.nn.functional as F

from peer_nets import (IMAGE, MM_CHANNELS, PATCH, TEXT, feed_forward, heads_of, linear, mm_attend, norm, timestep,
                       write_model)

Flux = collections.namedtuple("Flux", "hidden doubles singles heads side length width pooled axes")
CELLS = PATCH * PATCH * MM_CHANNELS
PARTS = ("time_text_embed.timestep_embedder", "time_text_embed.guidance_embedder", "time_text_embed.text_embedder")


def flux_shapes(c):
    d, shapes = c.hidden, {}

    def add(name, out, inputs):
        shapes.update({f"{name}.weight": (out, inputs), f"{name}.bias": (out,)})

    for part, width in zip(PARTS, (256, 256, c.pooled)):
        add(f"{part}.linear_1", d, width)
        add(f"{part}.linear_2", d, d)
    add("context_embedder", d, c.width)
    add("x_embedder", d, CELLS)
    add("norm_out.linear", 2 * d, d)
    add("proj_out", CELLS, d)
    for i in range(c.doubles):
        at = f"transformer_blocks.{i}"
        for part in ("norm1.linear", "norm1_context.linear"):
            add(f"{at}.{part}", 6 * d, d)
        for part in (*IMAGE[0], *TEXT[0], "to_out.0", "to_add_out"):
            add(f"{at}.attn.{part}", d, d)
        for part in (*IMAGE[1], *TEXT[1]):
            shapes[f"{at}.attn.{part}.weight"] = (d // c.heads,)
        for ff in ("ff", "ff_context"):
            add(f"{at}.{ff}.net.0.proj", 4 * d, d)
            add(f"{at}.{ff}.net.2", d, 4 * d)
    for i in range(c.singles):
        at = f"single_transformer_blocks.{i}"
        add(f"{at}.norm.linear", 3 * d, d)
        add(f"{at}.proj_mlp", 4 * d, d)
        add(f"{at}.proj_out", d, 5 * d)
        for part in IMAGE[0]:
            add(f"{at}.attn.{part}", d, d)
        for part in IMAGE[1]:
            shapes[f"{at}.attn.{part}.weight"] = (d // c.heads,)
    return shapes


def flux_files(folder, c, random):
    def of(name, shape):
        if len(shape) > 1:
            return random(shape, (0.5 if "norm" in name else 1) / math.sqrt(shape[1]))
        return random(shape, 0.1 if name.endswith("weight") else 0.05, 1.0 if name.endswith("weight") else 0.0)

    w = {name: of(name, shape) for name, shape in flux_shapes(c).items()}
    write_model(folder, dict(
        _class_name="FluxTransformer2DModel", attention_head_dim=c.hidden // c.heads, axes_dims_rope=c.axes,
        guidance_embeds=True, in_channels=CELLS, joint_attention_dim=c.width, num_attention_heads=c.heads,
        num_layers=c.doubles, num_single_layers=c.singles, out_channels=None, patch_size=1,
        pooled_projection_dim=c.pooled, sample_size=c.side, _text_length=c.length), w, "diffusion_pytorch_model")
    return w


def flux_inputs(c, batch, random):
    x = {k: random((batch, MM_CHANNELS, c.side, c.side), 1).float() for k in ("x", "dout")}
    x["t"] = torch.tensor([421.0, 999.0][:batch])
    x["guidance"] = torch.tensor([3500.0, 1000.0][:batch])
    x["text.t5"] = random((batch, c.length, c.width), 1).float()
    x["pooled.clip_l"] = random((batch, c.pooled), 1).float()
    return x


def turns(c, like):
    """cos and sin (T, hd / 2) of all tokens, texts first; fp64, rounded once."""
    n = c.side // PATCH
    row, column = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    places = torch.stack([torch.zeros(n * n), row.flatten(), column.flatten()], -1).double()
    places = torch.cat([torch.zeros(c.length, 3).double(), places])
    angles = torch.cat([places[:, k:k + 1] / 1e4 ** (torch.arange(0, width, 2).double() / width)
                        for k, width in enumerate(c.axes)], -1)
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return angles.cos().to(like.device, wide), angles.sin().to(like.device, wide)


def turned(x, turn):
    cos, sin = turn
    a, b = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def attend_turned(parts, turn):
    q, k, v = parts
    return mm_attend(turned(q, turn), turned(k, turn), v)


def double_block(w, c, i, h, text, e, turn):
    at = f"transformer_blocks.{i}"
    m = linear(w, e, f"{at}.norm1.linear").unflatten(-1, (6, 1, -1)).unbind(1)
    n = linear(w, e, f"{at}.norm1_context.linear").unflatten(-1, (6, 1, -1)).unbind(1)
    parts = [torch.cat(p, 2) for p in zip(heads_of(w, c, norm(text, n[0], n[1]), f"{at}.attn", *TEXT),
                                          heads_of(w, c, norm(h, m[0], m[1]), f"{at}.attn", *IMAGE))]
    o = attend_turned(parts, turn)
    h = h + m[2] * linear(w, o[:, text.shape[1]:], f"{at}.attn.to_out.0")
    h = h + m[5] * feed_forward(w, norm(h, m[3], m[4]), f"{at}.ff")
    text = text + n[2] * linear(w, o[:, :text.shape[1]], f"{at}.attn.to_add_out")
    return h, text + n[5] * feed_forward(w, norm(text, n[3], n[4]), f"{at}.ff_context")


def single_block(w, c, i, z, e, turn):
    at = f"single_transformer_blocks.{i}"
    shift, scale, gate = linear(w, e, f"{at}.norm.linear").unflatten(-1, (3, 1, -1)).unbind(1)
    y = norm(z, shift, scale)
    o = attend_turned(heads_of(w, c, y, f"{at}.attn", *IMAGE), turn)
    wide = F.gelu(linear(w, y, f"{at}.proj_mlp"), approximate="tanh")
    return z + gate * linear(w, torch.cat([o, wide], -1), f"{at}.proj_out")


def flux(w, c, x):
    """x: as lg-forward takes them."""
    e = timestep(w, None, x["t"], PARTS[0]) + timestep(w, None, x["guidance"], PARTS[1])
    e = e + linear(w, F.silu(linear(w, x["pooled.clip_l"], f"{PARTS[2]}.linear_1")), f"{PARTS[2]}.linear_2")
    e, n = F.silu(e), c.side // PATCH
    text = linear(w, x["text.t5"], "context_embedder")
    cells = x["x"].unflatten(3, (n, PATCH)).unflatten(2, (n, PATCH))  # (B, C, n, 2, n, 2)
    h = linear(w, cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), "x_embedder")
    turn = turns(c, h)
    for i in range(c.doubles):
        h, text = double_block(w, c, i, h, text, e, turn)
    z = torch.cat([text, h], 1)
    for i in range(c.singles):
        z = single_block(w, c, i, z, e, turn)
    scale, shift = linear(w, e, "norm_out.linear").unflatten(-1, (2, 1, -1)).unbind(1)
    h = linear(w, norm(z[:, c.length:], shift, scale), "proj_out").reshape(-1, n, n, MM_CHANNELS, PATCH, PATCH)
    return h.permute(0, 3, 1, 4, 2, 5).reshape(-1, MM_CHANNELS, c.side, c.side)
