#!/usr/bin/env python3
"""Trains a small DiT for 200 steps twice, by this system and by a plain PyTorch loop that shares no code
with it: the same initial weights, latents, posterior noise, diffusion noise, timesteps, label dropout and
learning rates. Compares the losses of metrics.jsonl step by step, the gradient norms, and the weights at
the end.

Usage: parity_train.py BUNDLE [--device cuda|host] [--precision fp32] [--steps 200] [--ranks 1]
                       [--objective flow|eps|v] [--hidden 128] [--depth 4] [--torch auto|cpu|cuda]
                       [--tolerance 1e-4] [--work DIR]

Prints the largest relative difference of the loss and where it is; exits 1 when it exceeds the tolerance.
The random numbers are Philox4x32-10 as base/philox.def and stages/nets/objective.c define them. Needs
torch and numpy, no network.
"""
import argparse
import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Places in base/philox.def.
DROPOUT, LATENT, TIMESTEP, NOISE = 4, 5, 6, 7
CHANNELS, SIDE, PATCH, CLASSES, ITEMS = 4, 8, 2, 10, 512
BATCH, LR, WARM_UP, WEIGHT_DECAY, CLIP, DROP = 16, 1e-3, 20, 0.01, 1.0, 0.1
BETAS, ADAM_EPS, SEED, SCALING = (0.9, 0.99), 1e-8, 12345, 0.9


# ---- random numbers ----

def philox(seed, purpose, n, blocks):
    """(len(n), blocks, 4) words; n: array of sample numbers."""
    n = np.asarray(n, dtype=np.uint64)[:, None]
    block = np.arange(blocks, dtype=np.uint64)[None, :]
    mask = np.uint64(0xFFFFFFFF)
    shape = np.broadcast(n, block).shape
    c = [np.broadcast_to(x, shape).copy() for x in (block & mask, block >> np.uint64(32), n & mask,
                                                    n >> np.uint64(32))]
    k0, k1 = seed & 0xFFFFFFFF, ((seed >> 32) ^ (purpose * 0x9E3779B9)) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), p1 & mask,
             (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def uniform(words):
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def normals(seed, purpose, n, count):
    """(len(n), count) standard normals by Box-Muller, in fp64."""
    u = uniform(philox(seed, purpose, n, (count + 3) // 4)).reshape(len(n), -1, 2)
    r, a = np.sqrt(-2 * np.log(u[..., 0])), 2 * np.pi * u[..., 1]
    return np.stack([r * np.cos(a), r * np.sin(a)], -1).reshape(len(n), -1)[:, :count]


def draw(objective, n):
    """Timestep as the net sees it and the coefficients of x0 and noise in x_t and target: (len(n), 4)."""
    u = uniform(philox(SEED, TIMESTEP, n, 1)[:, 0])
    t = 1 / (1 + np.exp(-np.sqrt(-2 * np.log(u[:, 0])) * np.cos(2 * np.pi * u[:, 1])))
    one = np.ones_like(t)
    if objective == "flow":
        return 1000 * t, np.stack([1 - t, t, -one, one], -1)
    t = np.minimum(np.floor(1000 * t), 999).astype(int)
    bar = np.cumprod(1 - (1e-4 + (0.02 - 1e-4) * np.arange(1000) / 999))[t]
    s, r = np.sqrt(bar), np.sqrt(1 - bar)
    return t.astype(float), np.stack([s, r, -r if objective == "v" else 0 * r,
                                      s if objective == "v" else one], -1)


# ---- files ----

def safetensors(tensors):
    header, at = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(
        np.ascontiguousarray(x).tobytes() for x in tensors.values())


def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, h in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        assert h["dtype"] == "F32", (name, h)
        a, b = h["data_offsets"]
        out[name] = np.frombuffer(data[8 + size + a:8 + size + b], np.float32).reshape(h["shape"])
    return out


def write_data(folder):
    """ITEMS latents with labels in one shard; returns mean, logvar, label."""
    rng = np.random.default_rng(1)
    mean = rng.standard_normal((ITEMS, CHANNELS, SIDE, SIDE)).astype(np.float32)
    mean += np.linspace(-1, 1, SIDE, dtype=np.float32)  # something to learn
    logvar = rng.uniform(-6, -2, mean.shape).astype(np.float32)
    label = rng.integers(0, CLASSES, ITEMS)
    os.makedirs(folder)
    with tarfile.open(f"{folder}/latents.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(ITEMS):
            latent = safetensors({"latent_mean": mean[i], "latent_logvar": logvar[i]})
            for name, data in ((f"{i:06}.latent.safetensors", latent), (f"{i:06}.cls", b"%d" % label[i])):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return mean, logvar, label


# ---- the net: diffusers' DiTTransformer2DModel, one embedder for all blocks ----

class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ada, self.qkv, self.out = nn.Linear(d, 6 * d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c))[:, None].chunk(6, -1)
        b, n, d = x.shape
        h = F.layer_norm(x, (d,), eps=1e-6) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = (q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)).softmax(-1)
        x = x + gate1 * self.out((p @ v).transpose(1, 2).reshape(b, n, d))
        h = F.layer_norm(x, (d,), eps=1e-5) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class DiT(nn.Module):
    def __init__(self, d, depth, heads):
        super().__init__()
        self.patch = nn.Conv2d(CHANNELS, d, PATCH, PATCH)
        self.t1, self.t2, self.label = nn.Linear(256, d), nn.Linear(d, d), nn.Embedding(CLASSES + 1, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.ada_out, self.out = nn.Linear(d, 2 * d), nn.Linear(d, PATCH * PATCH * CHANNELS)
        self.register_buffer("positions", self.make_positions(d))

    @staticmethod
    def make_positions(d):
        side, quarter = SIDE // PATCH, d // 4
        w = 1 / 10000 ** (np.arange(quarter) / quarter)
        row, column = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
        a, b = column.reshape(-1, 1) * w, row.reshape(-1, 1) * w
        return torch.tensor(np.concatenate([np.sin(a), np.cos(a), np.sin(b), np.cos(b)], 1))[None]

    def forward(self, x, t, label):
        waves = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128, device=t.device, dtype=t.dtype) / 127)
        c = self.t2(F.silu(self.t1(torch.cat([waves.cos(), waves.sin()], -1)))) + self.label(label)
        h = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.ada_out(F.silu(c))[:, None].chunk(2, -1)
        h = self.out(F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        s = SIDE // PATCH
        return h.reshape(-1, s, s, PATCH, PATCH, CHANNELS).permute(0, 5, 1, 3, 2, 4).reshape(-1, CHANNELS, SIDE, SIDE)

    def initialise(self):
        """The paper's, except small values where it has zeros: then every part has a gradient at once."""
        g = torch.Generator().manual_seed(0)
        for name, p in self.named_parameters():
            small = name.endswith("bias") or "ada" in name or name.startswith("out.")
            fan = p[0].numel() + p.shape[0] if p.dim() > 1 else 1
            bound = 0.02 if small or name.startswith(("t1", "t2", "label")) else math.sqrt(6 / fan)
            p.data = (torch.rand(p.shape, generator=g) * 2 - 1) * bound

    def as_diffusers(self):
        """name -> parameter or rows of one."""
        out = {"pos_embed.proj": self.patch, "proj_out_1": self.ada_out, "proj_out_2": self.out}
        tensors = {}
        for i, b in enumerate(self.blocks):
            at = f"transformer_blocks.{i}"
            emb = f"{at}.norm1.emb"
            out |= {f"{at}.norm1.linear": b.ada, f"{at}.attn1.to_out.0": b.out, f"{at}.ff.net.0.proj": b.fc1,
                    f"{at}.ff.net.2": b.fc2, f"{emb}.timestep_embedder.linear_1": self.t1,
                    f"{emb}.timestep_embedder.linear_2": self.t2}
            tensors[f"{emb}.class_embedder.embedding_table.weight"] = self.label.weight
            for j, name in enumerate("qkv"):
                for part in ("weight", "bias"):
                    rows = getattr(b.qkv, part).chunk(3)[j]
                    tensors[f"{at}.attn1.to_{name}.{part}"] = rows
        for name, m in out.items():
            tensors |= {f"{name}.weight": m.weight, f"{name}.bias": m.bias}
        return tensors


def write_model(net, folder, a):
    os.makedirs(folder)
    config = dict(_class_name="DiTTransformer2DModel", activation_fn="gelu-approximate", attention_bias=True,
                  attention_head_dim=a.hidden // a.heads, in_channels=CHANNELS, norm_elementwise_affine=False,
                  norm_eps=1e-5, norm_type="ada_norm_zero", num_attention_heads=a.heads,
                  num_embeds_ada_norm=CLASSES, num_layers=a.depth, out_channels=CHANNELS, patch_size=PATCH,
                  sample_size=SIDE)
    with open(f"{folder}/config.json", "w") as f:
        json.dump(config, f)
    with open(f"{folder}/diffusion_pytorch_model.safetensors", "wb") as f:
        f.write(safetensors({k: v.detach().cpu().float().numpy() for k, v in net.as_diffusers().items()}))


# ---- both runs ----

def rate(step, steps):
    if step < WARM_UP:
        return LR * (step + 1) / WARM_UP
    return LR * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP)))


def batch_of(step, data, objective):
    mean, logvar, label = data
    n = np.arange(step * BATCH, (step + 1) * BATCH)
    item, shape = n % ITEMS, (BATCH, CHANNELS, SIDE, SIDE)
    z, e = (normals(SEED, p, n, CHANNELS * SIDE * SIDE).reshape(shape) for p in (LATENT, NOISE))
    x0 = (mean[item] + np.exp(logvar[item].astype(np.float64) / 2) * z) * SCALING
    t, coef = draw(objective, n)
    c = coef[:, :, None, None, None]
    dropped = uniform(philox(SEED, DROPOUT, n, 1)[:, 0, 0]) < DROP
    return c[:, 0] * x0 + c[:, 1] * e, t, np.where(dropped, CLASSES, label[item]), c[:, 2] * x0 + c[:, 3] * e


def train_torch(net, data, a):
    device = a.torch if a.torch != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    net = net.to(device).to(getattr(torch, a.torch_dtype))
    like = net.patch.weight
    opt = torch.optim.AdamW(net.parameters(), lr=LR, betas=BETAS, eps=ADAM_EPS, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for step in range(a.steps):
        x, t, label, target = batch_of(step, data, a.objective)
        x, t, target = (torch.tensor(v).to(like) for v in (x, t, target))
        loss = F.mse_loss(net(x, t, torch.tensor(label, device=device)), target)
        opt.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        for g in opt.param_groups:
            g["lr"] = rate(step, a.steps)
        opt.step()
        losses.append(loss.item())
    return np.array(losses), np.array(norms), f"PyTorch {torch.__version__} on {device}"


CONFIG = """device = "{device}"
precision = "{precision}"
[job]
name = "parity"
dir = "{work}/run"
seed = {seed}
[data]
path = "{work}/data"
shuffle = false
latent_channels = {channels}
latent_size = {side}
latent_scaling = {scaling}
[loader]
chunk = 4
[model]
kind = "dit"
hidden = {hidden}
depth = {depth}
heads = {heads}
patch = {patch}
num_classes = {classes}
[trainer]
ranks = {ranks}
init_from = "{work}/model"
max_steps = {steps}
global_batch_size = {batch}
micro_batch_size = {micro}
objective = "{objective}"
timesteps = "logit_normal"
cond_dropout = {drop}
lr = {lr}
warmup_steps = {warm_up}
lr_schedule = "cosine"
beta1 = {beta1}
beta2 = {beta2}
adam_eps = {adam_eps}
weight_decay = {weight_decay}
clip_norm = {clip}
[ema]
decay = 0.99
"""


def train_ours(a, work):
    with open(f"{work}/pipeline.toml", "w") as f:
        f.write(CONFIG.format(device=a.device, precision=a.precision, work=work, seed=SEED, channels=CHANNELS,
                              side=SIDE, scaling=SCALING, hidden=a.hidden, depth=a.depth, heads=a.heads,
                              patch=PATCH, classes=CLASSES, ranks=a.ranks, steps=a.steps, batch=BATCH,
                              micro=BATCH // a.ranks // 2, objective=a.objective, drop=DROP, lr=LR,
                              warm_up=WARM_UP, beta1=BETAS[0], beta2=BETAS[1], adam_eps=ADAM_EPS,
                              weight_decay=WEIGHT_DECAY, clip=CLIP))
    done = subprocess.run([f"{a.bundle}/bin/lgsup", "start", f"{work}/pipeline.toml"], timeout=300,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAIL lgsup start: exit {done.returncode}\n{done.stdout}{done.stderr}")
    with open(f"{work}/run/metrics.jsonl") as f:
        lines = [json.loads(line) for line in f]
    assert [line["step"] for line in lines] == list(range(1, a.steps + 1))
    model = f"{work}/run/checkpoints/parity_step{a.steps}/model/diffusion_pytorch_model.safetensors"
    return (np.array([line["loss"] for line in lines]), np.array([line["grad_norm"] for line in lines]),
            read_safetensors(model))


def compare(a, work):
    net = DiT(a.hidden, a.depth, a.heads)
    net.initialise()
    data = write_data(f"{work}/data")
    write_model(net, f"{work}/model", a)
    losses, norms, weights = train_ours(a, work)
    want, want_norms, who = train_torch(net, data, a)
    error = np.abs(losses - want) / np.abs(want)
    norm_error = np.abs(norms - want_norms) / np.abs(want_norms)
    theirs = {k: v.detach().cpu().double().numpy() for k, v in net.as_diffusers().items()}
    away = math.sqrt(sum(((weights[k] - v)**2).sum() for k, v in theirs.items()) /
                     sum((v**2).sum() for v in theirs.values()))
    worst = int(error.argmax())
    print(f"{a.device} {a.precision}, {a.ranks} ranks, against {who} in {a.torch_dtype}: {a.objective}, DiT of "
          f"{a.depth} x {a.hidden}, {a.steps} steps of {BATCH}")
    print(f"loss {want[0]:.4f} -> {want[-1]:.4f}; largest relative difference {error[worst]:.2e} at step {worst + 1} "
          f"(median {np.median(error):.1e}, first step {error[0]:.1e}); gradient norm {norm_error.max():.2e}; "
          f"weights at the end {away:.2e}")
    well = bool(error[worst] <= a.tolerance)
    print(f"{'ok' if well else 'FAIL'} training parity: {error[worst]:.2e}, allowed {a.tolerance:g} at every step")
    return well


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bundle")
    p.add_argument("--device", default="cuda", choices=["cuda", "host"])
    p.add_argument("--precision", default="fp32")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--objective", default="flow", choices=["flow", "eps", "v"])
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--torch", default="auto")
    p.add_argument("--torch-dtype", default="float32", choices=["float32", "float64"])
    p.add_argument("--tolerance", type=float, default=1e-4)
    p.add_argument("--work", help="keep the files there; default: a temporary folder")
    a = p.parse_args()
    a.bundle = os.path.abspath(a.bundle)
    work = os.path.abspath(a.work) if a.work else tempfile.mkdtemp(prefix="lgt.", dir="/tmp")
    try:
        well = compare(a, work)
    finally:
        if not a.work:
            shutil.rmtree(work)
    sys.exit(0 if well else 1)


main()
