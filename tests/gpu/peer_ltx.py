# Peer for throughput: LTX-Video's transformer (width 2048, 28 blocks) with all weights trained, in PyTorch, bf16, torch.compile,
# fused AdamW, without EMA (as bench_step_cuda). Random weights; q, k, v of the self-attention are one product, as we have it.
# Usage: python3 peer_ltx.py FRAMES HEIGHT WIDTH BATCH [checkpoint] [blocks]     of the latent: 13 12 16 has 2,496 tokens, 16 25 40 16,000
#        checkpoint: blocks are recomputed in the backward; blocks: each block is compiled by itself, which takes less time
# Prints one line per SDPA backend: ms/step, samples/s, peak GiB. Compare against the best line.
import math
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from peer_dit_xl2 import TEmb

torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
TEXT, WIDE, CHANNELS = 128, 4096, 128


def mod(x, sh, sc):
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + sc) + sh


def rotate(x, cos, sin):
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def heads(x):
    return x.unflatten(-1, (-1, 64)).transpose(1, 2)


class Block(nn.Module):
    def __init__(s, h):
        super().__init__()
        s.qkv, s.out, s.q, s.kv, s.out2 = nn.Linear(h, 3 * h), nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, 2 * h), nn.Linear(h, h)
        s.norms = nn.ModuleList([nn.RMSNorm(h, eps=1e-5) for _ in range(4)])
        s.fc1, s.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        s.table = nn.Parameter(torch.randn(6, h) / h ** 0.5)

    def forward(s, x, c, t6, mask, cos, sin):
        sh, sc, g, sh2, sc2, g2 = (s.table + t6)[:, :, None].unbind(1)
        q, k, v = s.qkv(mod(x, sh, sc)).chunk(3, -1)
        q, k = rotate(s.norms[0](q), cos, sin), rotate(s.norms[1](k), cos, sin)
        o = F.scaled_dot_product_attention(heads(q), heads(k), heads(v).to(q.dtype))
        x = x + g * s.out(o.transpose(1, 2).flatten(2))
        k, v = s.kv(c).chunk(2, -1)
        q, k = s.norms[2](s.q(x)), s.norms[3](k)
        o = F.scaled_dot_product_attention(heads(q).to(v.dtype), heads(k).to(v.dtype), heads(v), mask)
        x = x + s.out2(o.transpose(1, 2).flatten(2))
        return x + g2 * s.fc2(F.gelu(s.fc1(mod(x, sh2, sc2)), approximate="tanh"))


class Ltx(nn.Module):
    def __init__(s, size, h=2048, depth=28, recompute=False):
        super().__init__()
        s.x, s.t, s.t6, s.recompute = nn.Linear(CHANNELS, h), TEmb(h), nn.Linear(h, 6 * h), recompute
        s.text = nn.Sequential(nn.Linear(WIDE, h), nn.GELU(approximate="tanh"), nn.Linear(h, h))
        s.blocks = nn.ModuleList([Block(h) for _ in range(depth)])
        s.table, s.out = nn.Parameter(torch.randn(2, h) / h ** 0.5), nn.Linear(h, CHANNELS)
        grid = torch.stack(torch.meshgrid(*[torch.arange(n, dtype=torch.float64) for n in size], indexing="ij"), -1).flatten(0, 2)
        grid = grid * torch.tensor([8 / 25 / 20, 32 / 2048, 32 / 2048], dtype=torch.float64, device=grid.device)
        w = 1e4 ** torch.linspace(0, 1, h // 6, dtype=torch.float64) * math.pi / 2
        a = F.pad((w * (grid[..., None] * 2 - 1)).transpose(-1, -2).flatten(1), (h % 6 // 2, 0))
        s.register_buffer("cos", a.cos().float())
        s.register_buffer("sin", a.sin().float())

    def forward(s, x, t, text, mask):
        x, c, e = s.x(x), s.text(text), s.t(t)
        t6 = s.t6(F.silu(e)).unflatten(-1, (6, -1))
        for b in s.blocks:
            if s.recompute:
                x = checkpoint(b, x, c, t6, mask, s.cos, s.sin, use_reentrant=False)
            else:
                x = b(x, c, t6, mask, s.cos, s.sin)
        sh, sc = (s.table + e[:, None])[:, :, None].unbind(1)
        return s.out(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + sc) + sh)


def bench(size, B, words, sdpa, iters=8):
    torch.manual_seed(0)
    with torch.device("cuda"):
        m = Ltx(size, recompute="checkpoint" in words)
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4, weight_decay=0, fused=True)
    f = m if "blocks" in words else torch.compile(m)
    for b in m.blocks if "blocks" in words else ():
        b.compile()
    N, like = math.prod(size), dict(device="cuda", dtype=torch.bfloat16)
    x, text, target = torch.randn(B, N, CHANNELS, **like), torch.randn(B, TEXT, WIDE, **like), torch.randn(B, N, CHANNELS, device="cuda")
    t, lengths = torch.randint(0, 1000, (B,), device="cuda"), torch.randint(1, TEXT + 1, (B,), device="cuda")
    mask = (torch.arange(TEXT, device="cuda") < lengths[:, None])[:, None, None]

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            o = f(x, t, text, mask)
        F.mse_loss(o.float(), target).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    with sdpa_kernel(sdpa):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(iters):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            step()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b))
    times.sort()
    ms = times[len(times) // 2]
    print(f"LTX {N} tokens B={B} {sum(p.numel() for p in m.parameters()) / 1e6:.1f} M {' '.join(words)} "
          f"sdpa={[b.name for b in sdpa]}: {ms:.1f} ms/step {B / ms * 1e3:.3f} samples/s  "
          f"peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB", flush=True)


if __name__ == "__main__":
    size, B = [int(v) for v in sys.argv[1:4]], int(sys.argv[4])
    print(torch.__version__, torch.cuda.get_device_name(), torch.backends.cudnn.version())
    # The text's mask is none of flash attention's, which leaves that attention to the memory-efficient one.
    for sdpa in ([SDPBackend.CUDNN_ATTENTION], [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        try:
            bench(size, B, sys.argv[5:], sdpa)
        except Exception as e:
            print("ERR", sys.argv, sdpa, str(e)[:300], flush=True)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
