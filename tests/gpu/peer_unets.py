"""Stable Diffusion 2.1's and SDXL's U-Nets for parity_nets.py: diffusers' UNet2DConditionModel itself, with random weights."""
import json
import math
import os

import torch
from diffusers import UNet2DConditionModel

from peer_nets import write

SD21 = dict(sample_size=64, cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], block_out_channels=[320, 640, 1280, 1280],
            layers_per_block=2, use_linear_projection=True)
SDXL = dict(sample_size=128, cross_attention_dim=2048, attention_head_dim=[5, 10, 20], block_out_channels=[320, 640, 1280],
            layers_per_block=2, use_linear_projection=True, transformer_layers_per_block=[1, 2, 10],
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816)
CLIP_L, POOLED = 768, 1280  # of SDXL's states; the rest are bigG's, as the pooled vector is
SIZES = torch.tensor([[1024.0, 768, 0, 96, 1024, 1024], [333, 517, 40, 0, 768, 1024]])


def unet_config(kind, tiny):
    if not tiny:
        return SD21 if kind == "sd2" else SDXL
    if kind == "sd2":
        return SD21 | dict(cross_attention_dim=24, attention_head_dim=[1, 2, 4, 4], block_out_channels=[8, 16, 32, 32], norm_num_groups=4)
    return SDXL | dict(cross_attention_dim=32, attention_head_dim=[1, 2, 4], block_out_channels=[8, 16, 32], norm_num_groups=4,
                       transformer_layers_per_block=[1, 2, 3], addition_time_embed_dim=6, projection_class_embeddings_input_dim=14 + 36)


def unet_files(folder, config, random):
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in UNet2DConditionModel(**config).state_dict().items()}

    def of(name, shape):
        if len(shape) > 1:
            return random(shape, 1 / math.sqrt(math.prod(shape[1:])))
        return random(shape, 0.1, 1.0) if name.endswith("weight") else random(shape, 0.05)

    w = {k: of(k, v) for k, v in shapes.items()}
    os.makedirs(folder)
    with open(f"{folder}/config.json", "w") as f:
        json.dump(dict(config, _class_name="UNet2DConditionModel", in_channels=4, out_channels=4), f)
    write(f"{folder}/diffusion_pytorch_model.safetensors", w)
    return w


def unet_inputs(config, height, width, random, tiny, batch=2):
    """Of one or two samples."""
    pooled = 14 if tiny else POOLED
    x = {k: random((batch, 4, height, width), 1).float() for k in ("x", "dout")} | {"t": torch.tensor([421.0, 999.0][:batch])}
    text = random((batch, 77, config["cross_attention_dim"]), 1).float()
    if "addition_embed_type" not in config:
        return x | {"text": text}
    first = 16 if tiny else CLIP_L
    return x | {"text.clip_l": text[..., :first].contiguous(), "text.clip_g": text[..., first:].contiguous(),
                "pooled.clip_g": random((batch, pooled), 1).float(), "size": SIZES[:batch].flatten().clone()}


class Waves(torch.nn.Module):
    """diffusers' embedding of a timestep or size, which it computes in fp32, in fp64: 1e-4 radians at t = 999 are no error of a net."""

    def __init__(self, n):
        super().__init__()
        self.frequencies = [1e4 ** (-i / (n // 2)) for i in range(n // 2)]

    def forward(self, t):
        a = t.double()[:, None] * torch.tensor(self.frequencies, dtype=torch.float64, device=t.device)
        return torch.cat([a.cos(), a.sin()], -1)


def unet(w, config, x):
    """The inputs of unet_inputs; w: of parameters that ask for gradients."""
    with torch.device("meta"):
        m = UNet2DConditionModel(**config)
    dtype = next(iter(w.values())).dtype
    text = x.get("text")
    more = None
    if text is None:
        text = torch.cat([x["text.clip_l"], x["text.clip_g"]], -1)
        more = {"text_embeds": x["pooled.clip_g"], "time_ids": x["size"].view(-1, 6)}
    t = x["t"].to(dtype if dtype == torch.float64 else torch.float32)
    m.to(dtype)  # which the embedding of timesteps is cast to
    m.time_proj = Waves(config["block_out_channels"][0])
    if more:
        m.add_time_proj = Waves(config["addition_time_embed_dim"])
    return torch.func.functional_call(m, w, (x["x"], t, text), {"added_cond_kwargs": more}).sample
