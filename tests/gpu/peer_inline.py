#!/usr/bin/env python3
"""The peer of the pipeline: a net in PyTorch that encodes its pictures inline, as training scripts do,
on one GPU and on all of them (DDP). bf16, torch.compile for net and encoders, fused AdamW, foreach EMA.
The net is DiT-XL/2 at 256 px, or with `--net sd21` diffusers' U-Net of Stable Diffusion 2.1 at 512 px, whose captions
a text encoder of CLIP H's size reads; the U-Net is compiled block by block, which takes minutes less (peer_unet.py).

Usage: peer_inline.py [BATCH] [--net dit|sd21] [--steps 20] [--gpus N ...] [--tiny]      BATCH: global, default 256

The pictures are random bytes that lie in pinned memory already: reading and decoding cost nothing here,
unlike in bench_pipeline.sh. The encoder has Stable Diffusion's size and random weights, 32 pictures at a
time. Prints a line per number of GPUs. --tiny: a small net on the CPU, to try the script.
"""
import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from peer_dit_xl2 import DiT

SLICE, WARM_UP, SCALING = 32, 5, 0.18215
VOCABULARY, TOKENS = 49408, 77
BUCKET_MB = 400  # 2.7 GB of gradients in 7 buckets: each is a graph of its own to compile


class Res(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, i, 1e-6), nn.Conv2d(i, o, 3, 1, 1)
        self.n2, self.c2 = nn.GroupNorm(32, o, 1e-6), nn.Conv2d(o, o, 3, 1, 1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x):
        return self.skip(x) + self.c2(F.silu(self.n2(self.c1(F.silu(self.n1(x))))))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n = nn.GroupNorm(32, c, 1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(c, c) for _ in range(4))

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.n(x).flatten(2).transpose(1, 2)
        y = F.scaled_dot_product_attention(self.q(y)[:, None], self.k(y)[:, None], self.v(y)[:, None])[:, 0]
        return x + self.o(y).transpose(1, 2).reshape(b, c, h, w)


class Encoder(nn.Module):
    """diffusers' AutoencoderKL: its encoder and quant_conv."""

    def __init__(self, channels):
        super().__init__()
        parts, last = [nn.Conv2d(3, channels[0], 3, 1, 1)], channels[0]
        for i, c in enumerate(channels):
            parts += [Res(last, c), Res(c, c)]
            if i < len(channels) - 1:
                parts.append(nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(c, c, 3, 2, 0)))
            last = c
        parts += [Res(last, last), Attention(last), Res(last, last), nn.GroupNorm(32, last, 1e-6), nn.SiLU(),
                  nn.Conv2d(last, 8, 3, 1, 1), nn.Conv2d(8, 8, 1)]
        self.all = nn.Sequential(*parts)

    def forward(self, x):
        return self.all(x)


class Text(nn.Module):
    """CLIP's text encoder of Stable Diffusion 2: 23 layers of width 1024, 16 heads."""

    def __init__(self, width=1024, layers=23):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(TOKENS, width) * 0.01)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(TOKENS))

    def forward(self, ids):
        return self.layers(self.token(ids) + self.position, mask=self.causal.to(self.position.dtype), is_causal=True)


class UNet(nn.Module):
    """Called as DiT is: with the text where that has labels."""

    def __init__(self, tiny):
        super().__init__()
        from diffusers import UNet2DConditionModel

        from peer_unet import SD21
        small = dict(block_out_channels=(32, 64, 64, 64), attention_head_dim=[1, 2, 2, 2], cross_attention_dim=64, layers_per_block=1)
        self.unet = UNet2DConditionModel(**(SD21 | (small if tiny else {}))).to(memory_format=torch.channels_last)

    def forward(self, x, t, text):
        return self.unet(x, t, text, return_dict=False)[0]


def build(a, device):
    torch.manual_seed(0)
    text = None
    if a.net == "sd21":
        net, side = UNet(a.tiny), 64 if a.tiny else 512
        text = Text(*(64, 1) if a.tiny else ()).to(device, torch.bfloat16).eval().requires_grad_(False)
    else:
        net, side = (DiT(depth=1, h=64, nh=4, size=8), 64) if a.tiny else (DiT(), 256)
    vae = Encoder((32, 32, 32, 32) if a.tiny else (128, 256, 512, 512))
    vae = vae.to(device, torch.bfloat16).to(memory_format=torch.channels_last).eval().requires_grad_(False)
    return net.to(device), vae, text, side


def run(rank, a, world):
    device = torch.device("cpu") if a.tiny else torch.device("cuda", rank)
    if not a.tiny:
        torch.cuda.set_device(device)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29517 + world))
        dist.init_process_group("gloo" if a.tiny else "nccl", rank=rank, world_size=world)
    net, vae, text, side = build(a, device)
    ema = [p.detach().clone() for p in net.parameters()]
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0, fused=not a.tiny)
    step_net, encode = net, vae
    if a.compile and text:  # before DistributedDataParallel, whose buckets would cut each block's graph
        from peer_unet import compiled
        os.environ["PEER_BLOCKS"] = "1"
        compiled(net)
    torch.backends.cudnn.benchmark = bool(text)
    if world > 1:  # inside of compile, which cuts the graph at the buckets: sums are made beside the backward pass
        step_net = nn.parallel.DistributedDataParallel(step_net, device_ids=None if a.tiny else [rank],
                                                       gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
    if a.compile:
        encode = torch.compile(encode)
        if text:  # one code for its equal layers
            for layer in text.layers.layers:
                layer.compile()
        else:
            step_net = torch.compile(step_net)
    began_all = time.perf_counter()
    share = a.batch // world
    pixels = [torch.randint(0, 256, (share, 3, side, side), dtype=torch.uint8, pin_memory=not a.tiny) for _ in range(2)]
    size = side // 8

    def latents(x):
        with torch.no_grad():
            x = x.to(device, non_blocking=True)
            x = (x.to(torch.bfloat16) / 127.5 - 1).to(memory_format=torch.channels_last)
            z = torch.cat([encode(part) for part in x.split(min(SLICE, share))]).float()
            mean, logvar = z.chunk(2, 1)
            return (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)) * SCALING

    def step(i):
        x0 = latents(pixels[i % 2])
        condition, t = torch.randint(0, 1000, (share,), device=device), torch.randint(0, 1000, (share,), device=device)
        if text:
            with torch.no_grad():
                condition = text(torch.randint(0, VOCABULARY, (share, TOKENS), device=device))
        alpha = torch.cos(t / 1000 * 1.5)[:, None, None, None]
        e = torch.randn_like(x0)
        with torch.autocast(device.type, torch.bfloat16):
            out = step_net(alpha * x0 + (1 - alpha**2).sqrt() * e, t, condition)
        target = e
        if not text:
            out = out[..., :16]
            target = e.reshape(share, 4, size // 2, 2, size // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(share, -1, 16)
        loss = F.mse_loss(out.float(), target)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        torch._foreach_lerp_(ema, [p.detach() for p in net.parameters()], 1e-4)

    times = []
    for i in range(WARM_UP + a.steps):
        if i == WARM_UP and rank == 0:
            print(f"{world} GPUs: compiled and warm after {began - began_all:.0f} s", flush=True)
        while i == WARM_UP and a.after and not os.path.exists(a.after):
            time.sleep(0.1)
        began = time.perf_counter()
        step(i)
        if not a.tiny:
            torch.cuda.synchronize()
        if i >= WARM_UP:
            times.append(time.perf_counter() - began)
    if rank == 0:
        ms = 1000 * statistics.median(times)
        peak = 0 if a.tiny else torch.cuda.max_memory_allocated() / 2**30
        print(f"PyTorch {torch.__version__}, {a.net}, inline encoding, {world} GPUs, batch {a.batch}: {ms:.1f} ms/step "
              f"{1000 * a.batch / ms:.0f} img/s, peak {peak:.1f} GiB a GPU", flush=True)
    if world > 1:
        dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("batch", type=int, nargs="?", default=256)
    p.add_argument("--net", choices=["dit", "sd21"], default="dit")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="as many of them as there are")
    p.add_argument("--after", metavar="FILE", help="wait for it before what is timed, so that the compilation may run beside others' work")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--compile", action="store_true", help="with --tiny too")
    a = p.parse_args()
    a.compile = a.compile or not a.tiny
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    there = 2 if a.tiny else torch.cuda.device_count()
    for world in a.gpus:
        if world <= there and a.batch % world == 0:
            mp.spawn(run, args=(a, world), nprocs=world)


if __name__ == "__main__":
    main()
