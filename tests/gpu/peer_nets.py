"""The nets of parity_nets.py in PyTorch, with their random weights and files: DiT, PixArt, SD3, AutoencoderKL and
T5's encoder as functions of a dictionary of parameters, which has the names of diffusers and transformers.
They run in the type of their parameters."""
import collections
import json
import math
import os

import numpy as np
import torch
import torch.nn.functional as F


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
    a = t[:, None].to(wide) * torch.exp(-math.log(10000) * i / (128 - (c is not None and c.kind == "dit")))
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
        q, k, v = (F.linear(y, cast(w[f"{at}.0.SelfAttention.{n}.weight"])).unflatten(-1, (c["heads"], -1))
                   for n in "qkv")
        o = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), mask, scale=1.0)
        x = x + F.linear(o.transpose(1, 2).flatten(2), cast(w[f"{at}.0.SelfAttention.o.weight"]))
        y = rms_norm(x, cast(w[f"{at}.1.layer_norm.weight"]))
        ff = f"{at}.1.DenseReluDense"
        gate = F.gelu(F.linear(y, cast(w[f"{ff}.wi_0.weight"])), approximate="tanh")
        x = x + F.linear(gate * F.linear(y, cast(w[f"{ff}.wi_1.weight"])), cast(w[f"{ff}.wo.weight"]))
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


# ---- SD3: joint attention of image and text, a second one in the first blocks ----

Mmdit = collections.namedtuple("Mmdit", "hidden depth heads side duals lengths widths pooled table")
MM_CHANNELS = 16
CLIPS = ("clip_l", "clip_g")


def sd3_shapes(c):
    d, shapes = c.hidden, {}

    def add(name, out, inputs):
        shapes.update({f"{name}.weight": (out, inputs), f"{name}.bias": (out,)})

    shapes.update({"pos_embed.proj.weight": (d, MM_CHANNELS, PATCH, PATCH), "pos_embed.proj.bias": (d,),
                   "pos_embed.pos_embed": (1, c.table ** 2, d)})
    for part, width in (("timestep", 256), ("text", sum(c.pooled))):
        add(f"time_text_embed.{part}_embedder.linear_1", d, width)
        add(f"time_text_embed.{part}_embedder.linear_2", d, d)
    add("context_embedder", d, c.widths[2])
    add("norm_out.linear", 2 * d, d)
    add("proj_out", PATCH * PATCH * MM_CHANNELS, d)
    for i in range(c.depth):
        at, last, dual = f"transformer_blocks.{i}", i == c.depth - 1, i < c.duals
        add(f"{at}.norm1.linear", (9 if dual else 6) * d, d)
        add(f"{at}.norm1_context.linear", (2 if last else 6) * d, d)
        for part in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"):
            add(f"{at}.attn.{part}", d, d)
        for part in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{at}.attn.{part}.weight"] = (d // c.heads,)
        if dual:
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                add(f"{at}.attn2.{part}", d, d)
            for part in ("norm_q", "norm_k"):
                shapes[f"{at}.attn2.{part}.weight"] = (d // c.heads,)
        if not last:
            add(f"{at}.attn.to_add_out", d, d)
        for ff in ("ff",) if last else ("ff", "ff_context"):
            add(f"{at}.{ff}.net.0.proj", 4 * d, d)
            add(f"{at}.{ff}.net.2", d, 4 * d)
    return shapes


def sd3_files(folder, c, random):
    def of(name, shape):
        if len(shape) > 1:
            gain = 0.5 if "norm" in name else 1
            return random(shape, 0.3 if "pos_embed.pos" in name else gain / math.sqrt(math.prod(shape[1:])))
        return random(shape, 0.1 if name.endswith("weight") else 0.05, 1.0 if name.endswith("weight") else 0.0)

    w = {name: of(name, shape) for name, shape in sd3_shapes(c).items()}
    write_model(folder, dict(
        _class_name="SD3Transformer2DModel", attention_head_dim=c.hidden // c.heads, caption_projection_dim=c.hidden,
        dual_attention_layers=list(range(c.duals)), in_channels=MM_CHANNELS, joint_attention_dim=c.widths[2],
        num_attention_heads=c.heads, num_layers=c.depth, out_channels=MM_CHANNELS, patch_size=PATCH,
        pooled_projection_dim=sum(c.pooled), pos_embed_max_size=c.table, qk_norm="rms_norm", sample_size=c.side,
        _text_lengths=c.lengths, _text_widths=c.widths, _text_pooled=[*c.pooled, 0]), w, "diffusion_pytorch_model")
    return w


def sd3_inputs(c, batch, random):
    x = {k: random((batch, MM_CHANNELS, c.side, c.side), 1).float() for k in ("x", "dout")}
    x["t"] = torch.tensor([421.0, 999.0][:batch])
    for name, length, width in zip((*CLIPS, "t5"), c.lengths, c.widths):
        x[f"text.{name}"] = random((batch, length, width), 1).float()
    for name, width in zip(CLIPS, c.pooled):
        x[f"pooled.{name}"] = random((batch, width), 1).float()
    return x


def heads_of(w, c, x, at, parts, norms):
    """q, k, v (B, H, T, hd), queries and keys normed."""
    out = [linear(w, x, f"{at}.{part}").unflatten(-1, (c.heads, -1)).transpose(1, 2) for part in parts]
    for i, name in enumerate(norms):
        out[i] = rms_norm(out[i], w[f"{at}.{name}.weight"])
    return out


IMAGE = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")


def mm_attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def feed_forward(w, x, at):
    return linear(w, F.gelu(linear(w, x, f"{at}.net.0.proj"), approximate="tanh"), f"{at}.net.2")


def sd3_block(w, c, i, h, text, e):
    at, last, dual = f"transformer_blocks.{i}", i == c.depth - 1, i < c.duals
    m = linear(w, e, f"{at}.norm1.linear").unflatten(-1, (9 if dual else 6, 1, -1)).unbind(1)
    n = linear(w, e, f"{at}.norm1_context.linear").unflatten(-1, (2 if last else 6, 1, -1)).unbind(1)
    parts = [torch.cat(p, 2) for p in zip(
        heads_of(w, c, norm(h, m[0], m[1]), f"{at}.attn", *IMAGE),
        heads_of(w, c, norm(text, n[1], n[0]) if last else norm(text, n[0], n[1]), f"{at}.attn", *TEXT))]
    o, before = mm_attend(*parts), h
    h = h + m[2] * linear(w, o[:, :h.shape[1]], f"{at}.attn.to_out.0")
    if dual:
        second = mm_attend(*heads_of(w, c, norm(before, m[6], m[7]), f"{at}.attn2", *IMAGE))
        h = h + m[8] * linear(w, second, f"{at}.attn2.to_out.0")
    h = h + m[5] * feed_forward(w, norm(h, m[3], m[4]), f"{at}.ff")
    if last:
        return h, None
    text = text + n[2] * linear(w, o[:, h.shape[1]:], f"{at}.attn.to_add_out")
    return h, text + n[5] * feed_forward(w, norm(text, n[3], n[4]), f"{at}.ff_context")


def sd3(w, c, x):
    """x: as lg-forward takes them."""
    name = "time_text_embed.text_embedder"
    pooled = torch.cat([x[f"pooled.{clip}"] for clip in CLIPS], -1)
    e = timestep(w, None, x["t"], "time_text_embed.timestep_embedder")
    e = F.silu(e + linear(w, F.silu(linear(w, pooled, f"{name}.linear_1")), f"{name}.linear_2"))
    states = torch.cat([x[f"text.{clip}"] for clip in CLIPS], -1)
    states = F.pad(states, (0, c.widths[2] - states.shape[-1]))
    text = linear(w, torch.cat([states, x["text.t5"]], 1), "context_embedder")
    n = c.side // PATCH
    at = (c.table - n) // 2
    table = w["pos_embed.pos_embed"].unflatten(1, (c.table, c.table))[:, at:at + n, at:at + n].flatten(1, 2)
    h = F.conv2d(x["x"], w["pos_embed.proj.weight"], w["pos_embed.proj.bias"], PATCH).flatten(2).transpose(1, 2) + table
    for i in range(c.depth):
        h, text = sd3_block(w, c, i, h, text, e)
    scale, shift = linear(w, e, "norm_out.linear").unflatten(-1, (2, 1, -1)).unbind(1)
    h = linear(w, norm(h, shift, scale), "proj_out").reshape(-1, n, n, PATCH, PATCH, MM_CHANNELS)
    return h.permute(0, 5, 1, 3, 2, 4).reshape(-1, MM_CHANNELS, c.side, c.side)
