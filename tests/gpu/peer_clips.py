"""Latte and LTX-Video for parity_nets.py, in PyTorch: see peer_nets.py. A clip's frames lie below one another, (B, C, F H, W)."""
import collections
import math

import torch
import torch.nn.functional as F

from peer_nets import PATCH, attend, linear, norm, timestep, write_model

Clip = collections.namedtuple("Clip", "kind hidden depth heads channels size text text_dim")  # size: frames, height, width


def patch_of(c):
    return PATCH if c.kind == "latte" else 1


def emb_of(c):
    return "adaln_single" if c.kind == "latte" else "time_embed"


def blocks_of(c):
    """The names of all blocks, and whether they attend to the text."""
    for i in range(c.depth):
        yield f"transformer_blocks.{i}", True
        if c.kind == "latte":
            yield f"temporal_transformer_blocks.{i}", False


def clip_shapes(c):
    d, p, shapes = c.hidden, patch_of(c), {}

    def add(name, out, inputs):
        shapes.update({f"{name}.weight": (out, inputs), f"{name}.bias": (out,)})

    if c.kind == "latte":
        shapes.update({"pos_embed.proj.weight": (d, c.channels, p, p), "pos_embed.proj.bias": (d,)})
    else:
        add("proj_in", d, c.channels)
    add(f"{emb_of(c)}.emb.timestep_embedder.linear_1", d, 256)
    add(f"{emb_of(c)}.emb.timestep_embedder.linear_2", d, d)
    add(f"{emb_of(c)}.linear", 6 * d, d)
    add("caption_projection.linear_1", d, c.text_dim)
    add("caption_projection.linear_2", d, d)
    shapes["scale_shift_table"] = (2, d)
    add("proj_out", p * p * c.channels * (2 if c.kind == "latte" else 1), d)
    for at, has_text in blocks_of(c):
        shapes[f"{at}.scale_shift_table"] = (6, d)
        for attention in ("attn1", "attn2")[:1 + has_text]:
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                add(f"{at}.{attention}.{part}", d, d)
            for part in ("norm_q", "norm_k") if c.kind == "ltx" else ():
                shapes[f"{at}.{attention}.{part}.weight"] = (d,)
        add(f"{at}.ff.net.0.proj", 4 * d, d)
        add(f"{at}.ff.net.2", d, 4 * d)
    return shapes


def clip_files(folder, c, random):
    def of(name, shape):
        if "table" in name:
            return random(shape, 0.3)
        if len(shape) == 1:
            return random(shape, 0.1, 1.0) if "norm_" in name else random(shape, 0.05)
        return random(shape, (0.5 if name.startswith(f"{emb_of(c)}.linear") else 1) / math.sqrt(math.prod(shape[1:])))

    w = {name: of(name, shape) for name, shape in clip_shapes(c).items()}
    f, height, width = c.size
    config = dict(activation_fn="gelu-approximate", attention_bias=True, attention_head_dim=c.hidden // c.heads,
                  caption_channels=c.text_dim, cross_attention_dim=c.hidden, in_channels=c.channels,
                  norm_elementwise_affine=False, norm_eps=1e-6, num_attention_heads=c.heads, num_layers=c.depth,
                  patch_size=patch_of(c), _sample_height=height, _sample_width=width, _text_length=c.text)
    if c.kind == "latte":
        config.update(_class_name="LatteTransformer3DModel", out_channels=2 * c.channels, norm_type="ada_norm_single",
                      num_embeds_ada_norm=1000, sample_size=height, video_length=f)
    else:
        config.update(_class_name="LTXVideoTransformer3DModel", out_channels=c.channels, qk_norm="rms_norm_across_heads",
                      _sample_frames=f)
    write_model(folder, config, w, "diffusion_pytorch_model")
    return w


def clip_inputs(c, batch, random):
    f, height, width = c.size
    out = c.channels * (2 if c.kind == "latte" else 1)
    return {"x": random((batch, c.channels, f * height, width), 1).float(),
            "dout": random((batch, out, f * height, width), 1).float(),
            "t": torch.tensor([421.0, 999.0][:batch]), "text": random((batch, c.text, c.text_dim), 1).float(),
            "text_length": torch.tensor([c.text // 2 - 1, c.text][-batch:], dtype=torch.int32)}


def sincos(at, d):
    """(N, d): d / 2 sines, then cosines, of numbers (N)."""
    a = at.double()[:, None] * 1e4 ** (-torch.arange(d // 2, dtype=torch.float64) / (d // 2))
    return torch.cat([a.sin(), a.cos()], -1)


def in_frame(c, like):
    _, height, width = c.size
    base, scale = height // PATCH, max(height // 64, 1)
    row, column = (torch.arange(n // PATCH, dtype=torch.float64) / (n // PATCH / base) / scale for n in (height, width))
    row, column = torch.meshgrid(row, column, indexing="ij")
    return torch.cat([sincos(column.flatten(), c.hidden // 2), sincos(row.flatten(), c.hidden // 2)], -1).to(like)


def angles(c, like):
    grid = torch.stack(torch.meshgrid(*[torch.arange(n, dtype=torch.float64) for n in c.size], indexing="ij"), -1).flatten(0, 2)
    grid = grid * torch.tensor([8 / 25 / 20, 32 / 2048, 32 / 2048], dtype=torch.float64)
    w = 1e4 ** torch.linspace(0, 1, c.hidden // 6, dtype=torch.float64) * math.pi / 2
    a = (w * (grid[..., None] * 2 - 1)).transpose(-1, -2).flatten(1)
    a = F.pad(a, (c.hidden % 6 // 2, 0))
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return a.cos().to(like.device, wide), a.sin().to(like.device, wide)


def rms(x, eps, weight=None):
    wide = x if x.dtype == torch.float64 else x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight


def turned(x, turn):
    a, b = x.to(turn[0].dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]], -1).flatten(-2).to(x.dtype)


def normed_attend(w, c, name, x, context, turn=None, mask=None):
    q = rms(linear(w, x, f"{name}.to_q"), 1e-5, w[f"{name}.norm_q.weight"])
    k = rms(linear(w, context, f"{name}.to_k"), 1e-5, w[f"{name}.norm_k.weight"])
    if turn is not None:
        q, k = turned(q, turn), turned(k, turn)
    q, k, v = (y.unflatten(-1, (c.heads, -1)).transpose(1, 2) for y in (q, k, linear(w, context, f"{name}.to_v")))
    o = F.scaled_dot_product_attention(q, k, v, mask)
    return linear(w, o.transpose(1, 2).flatten(2), f"{name}.to_out.0")


def latte_attend(w, c, at, y, along_time):
    """y (B, F S, D) in frames, or along time."""
    B, f = y.shape[0], c.size[0]
    y = y.unflatten(1, (f, -1))
    y = y.transpose(1, 2).flatten(0, 1) if along_time else y.flatten(0, 1)
    o = attend(w, f"{at}.attn1", y, y, c.heads).unflatten(0, (B, -1))
    return (o.transpose(1, 2) if along_time else o).flatten(1, 2)


def block(w, c, at, h, t6, text):
    m = (w[f"{at}.scale_shift_table"] + t6)[:, :, None].unbind(1)
    mod = norm if c.kind == "latte" else lambda x, shift, scale: rms(x, 1e-6) * (1 + scale) + shift
    y = mod(h, m[0], m[1])
    if c.kind == "latte":
        h = h + m[2] * latte_attend(w, c, at, y, at.startswith("temporal"))
        if not at.startswith("temporal"):
            h = h + attend(w, f"{at}.attn2", h, text["states"], c.heads, text["mask"])
    else:
        h = h + m[2] * normed_attend(w, c, f"{at}.attn1", y, y, text["turn"])
        h = h + normed_attend(w, c, f"{at}.attn2", h, text["states"], None, text["mask"])
    y = F.gelu(linear(w, mod(h, m[3], m[4]), f"{at}.ff.net.0.proj"), approximate="tanh")
    return h + m[5] * linear(w, y, f"{at}.ff.net.2")


def clip_net(w, c, x):
    """The inputs of clip_inputs; (B, C or 2 C, F H, W)."""
    f, height, width = c.size
    p, rows = patch_of(c), f * height
    e = timestep(w, None, x["t"], f"{emb_of(c)}.emb.timestep_embedder")
    t6 = linear(w, F.silu(e), f"{emb_of(c)}.linear").unflatten(-1, (6, -1))
    states = F.gelu(linear(w, x["text"], "caption_projection.linear_1"), approximate="tanh")
    mask = torch.arange(c.text, device=states.device) < x["text_length"].to(states.device)[:, None]
    text = {"states": linear(w, states, "caption_projection.linear_2"), "mask": mask[:, None, None]}
    if c.kind == "latte":
        h = F.conv2d(x["x"], w["pos_embed.proj.weight"], w["pos_embed.proj.bias"], p).flatten(2).transpose(1, 2)
        h = (h.unflatten(1, (f, -1)) + in_frame(c, h)).flatten(1, 2)
    else:
        h = linear(w, x["x"].flatten(2).transpose(1, 2), "proj_in")
        text["turn"] = angles(c, h)
    for at, _ in blocks_of(c):
        if at == "temporal_transformer_blocks.0" and f > 1:
            h = (h.unflatten(1, (f, -1)) + sincos(torch.arange(f), c.hidden).to(h)[:, None]).flatten(1, 2)
        h = block(w, c, at, h, t6, text)
    h = linear(w, norm(h, *(w["scale_shift_table"] + e[:, None])[:, :, None].unbind(1)), "proj_out")
    if p == 1:
        return h.transpose(1, 2).unflatten(2, (rows, width))
    return h.reshape(-1, rows // p, width // p, p, p, 2 * c.channels).permute(0, 5, 1, 3, 2, 4).reshape(
        -1, 2 * c.channels, rows, width)
