# Peer for throughput: SD3.5-medium with all weights trained and FLUX.1 with a LoRA on its attentions, in PyTorch, bf16, torch.compile,
# fused AdamW, without EMA (as bench_step_cuda). Random weights; q, k, v of a stream are one product, as we have it.
# Usage: python3 peer_mmdit.py sd35m|flux-lora SIDE BATCH [WAYS]      SIDE: of the latent (128: 1024 px); WAYS: of 2, how many
# PEER_BLOCKS=1: compiled block by block, in one minute instead of five.
# Prints one line per SDPA backend: ms/step, img/s, peak GiB. Compare against the best line.
import os
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer_dit_xl2 import TEmb

torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")


class Lora(nn.Module):
    """A frozen linear in bf16 with adapters in fp32 for each of its parts, as peft has them for separate ones."""

    def __init__(s, i, o, parts=1, rank=16):
        super().__init__()
        s.base = nn.Linear(i, o).bfloat16().requires_grad_(False)
        s.a = nn.ParameterList([nn.Parameter(torch.randn(rank, i) * 0.02) for _ in range(parts)])
        s.b = nn.ParameterList([nn.Parameter(torch.randn(o // parts, rank) * 0.02) for _ in range(parts)])

    def forward(s, x):
        return s.base(x) + torch.cat([F.linear(F.linear(x, a), b) for a, b in zip(s.a, s.b)], -1)


def frozen(i, o):
    return nn.Linear(i, o).bfloat16().requires_grad_(False)


def mod(x, sh, sc):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + sc[:, None]) + sh[:, None]


class Heads(nn.Module):
    """q, k, v of a stream, RMS norm of q and k."""

    def __init__(s, linear, h, hd):
        super().__init__()
        s.qkv, s.hd = linear(h, 3 * h), hd
        s.nq, s.nk = nn.RMSNorm(hd, eps=1e-6), nn.RMSNorm(hd, eps=1e-6)

    def forward(s, x):
        q, k, v = s.qkv(x).unflatten(-1, (3, -1, s.hd)).unbind(2)
        return s.nq(q), s.nk(k), v


def attend(q, k, v, rope=None):
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).to(q.dtype)).transpose(1, 2).flatten(2)


def rotate(x, cos, sin):
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


class Stream(nn.Module):
    def __init__(s, linear, attention, h, hd, chunks, last=False):
        super().__init__()
        s.ada, s.heads, s.last = linear(h, chunks * h), Heads(attention, h, hd), last
        if not last:
            s.out, s.fc1, s.fc2 = (attention if attention is Lora else linear)(h, h), linear(h, 4 * h), linear(4 * h, h)

    def finish(s, x, o, g, sh, sc, g2):
        x = x + g[:, None] * s.out(o)
        return x + g2[:, None] * s.fc2(F.gelu(s.fc1(mod(x, sh, sc)), approximate="tanh"))


class Double(nn.Module):
    def __init__(s, linear, attention, h, hd, dual=False, last=False, text_first=False):
        super().__init__()
        s.x, s.c = Stream(linear, attention, h, hd, 9 if dual else 6), Stream(linear, attention, h, hd, 2 if last else 6, last)
        s.dual, s.text_first = dual, text_first
        if dual:
            s.dual_heads, s.dual_out = Heads(attention, h, hd), attention(h, h)

    def forward(s, x, c, e, rope=None):
        m, n = s.x.ada(e).chunk(9 if s.dual else 6, 1), s.c.ada(e).chunk(2 if s.c.last else 6, 1)
        nx = mod(x, m[0], m[1])
        nc = mod(c, n[1], n[0]) if s.c.last else mod(c, n[0], n[1])
        qkv = [torch.cat([b, a] if s.text_first else [a, b], 1) for a, b in zip(s.x.heads(nx), s.c.heads(nc))]
        o = attend(*qkv, rope)
        i, t = (o[:, c.shape[1]:], o[:, :c.shape[1]]) if s.text_first else (o[:, :x.shape[1]], o[:, x.shape[1]:])
        if s.dual:
            x = x + m[8][:, None] * s.dual_out(attend(*s.dual_heads(mod(x, m[6], m[7]))))
        x = s.x.finish(x, i, *m[2:6])
        return x, c if s.c.last else s.c.finish(c, t, *n[2:6])


class Single(nn.Module):
    def __init__(s, h, hd):
        super().__init__()
        s.ada, s.heads, s.up, s.out = frozen(h, 3 * h), Heads(lambda i, o: Lora(i, o, 3), h, hd), frozen(h, 4 * h), frozen(5 * h, h)

    def forward(s, x, e, rope):
        sh, sc, g = s.ada(e).chunk(3, 1)
        n = mod(x, sh, sc)
        return x + g[:, None] * s.out(torch.cat([attend(*s.heads(n), rope), F.gelu(s.up(n), approximate="tanh")], 2))


class Sd35(nn.Module):
    tokens, width, pooled, channels = 333, 4096, 2048, 64

    def __init__(s, side, h=1536, depth=24):
        super().__init__()
        s.x, s.context, s.t = nn.Linear(64, h), nn.Linear(4096, h), TEmb(h)
        s.p = nn.Sequential(nn.Linear(2048, h), nn.SiLU(), nn.Linear(h, h))
        s.register_buffer("pos", torch.randn(1, (side // 2) ** 2, h) * 0.02)
        s.blocks = nn.ModuleList([Double(nn.Linear, nn.Linear, h, 64, dual=i < 13, last=i == depth - 1) for i in range(depth)])
        s.ada, s.out = nn.Linear(h, 2 * h), nn.Linear(h, 64)

    def forward(s, x, t, text, pooled):
        x, c = s.x(x) + s.pos, s.context(text)
        e = F.silu(s.t(t) + s.p(pooled))
        for b in s.blocks:
            x, c = b(x, c, e)
        sc, sh = s.ada(e).chunk(2, 1)
        return s.out(mod(x, sh, sc))


class Flux(nn.Module):
    tokens, width, pooled, channels = 512, 4096, 768, 64

    def __init__(s, side, h=3072):
        super().__init__()
        s.x, s.context, s.t = frozen(64, h), frozen(4096, h), TEmb(h).bfloat16().requires_grad_(False)
        s.g = TEmb(h).bfloat16().requires_grad_(False)
        s.p = nn.Sequential(frozen(768, h), nn.SiLU(), frozen(h, h))
        angles = torch.rand((side // 2) ** 2 + s.tokens, 1, 64) * 6
        s.register_buffer("cos", angles.cos())
        s.register_buffer("sin", angles.sin())
        three = lambda i, o: Lora(i, o, 3) if o == 3 * i else Lora(i, o)
        s.blocks = nn.ModuleList([Double(frozen, three, h, 128, text_first=True) for _ in range(19)])
        for b in s.blocks:
            for stream in (b.x, b.c):
                stream.out = Lora(h, h)
        s.singles = nn.ModuleList([Single(h, 128) for _ in range(38)])
        for name, p in s.named_parameters():
            if ".nq." in name or ".nk." in name:
                p.requires_grad_(False)
        s.ada, s.out = frozen(h, 2 * h), frozen(h, 64)

    def forward(s, x, t, text, pooled):
        x, c = s.x(x), s.context(text)
        e = F.silu(s.t(t) + s.g(t) + s.p(pooled))
        rope = s.cos, s.sin
        for b in s.blocks:
            x, c = b(x, c, e, rope)
        x = torch.cat([c, x], 1)
        for b in s.singles:
            x = b(x, e, rope)
        sc, sh = s.ada(e).chunk(2, 1)
        return s.out(mod(x[:, c.shape[1]:], sh, sc))


def compiled(m):
    if not os.environ.get("PEER_BLOCKS"):
        return torch.compile(m)
    for b in [*m.blocks, *getattr(m, "singles", [])]:
        b.compile()
    return m


def bench(kind, side, B, sdpa, iters=10):
    torch.manual_seed(0)
    with torch.device("cuda"):
        m = kind(side)
    trained = [p for p in m.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0, fused=True)
    f = compiled(m)
    N = (side // 2) ** 2
    like = dict(device="cuda", dtype=torch.bfloat16)
    x, text, pooled = torch.randn(B, N, 64, **like), torch.randn(B, m.tokens, m.width, **like), torch.randn(B, m.pooled, **like)
    t, target = torch.randint(0, 1000, (B,), device="cuda"), torch.randn(B, N, 64, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            o = f(x, t, text, pooled)
        F.mse_loss(o.float(), target).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    with sdpa_kernel(sdpa):
        for _ in range(4):
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
    print(f"{kind.__name__} {8 * side} px B={B} trained={sum(p.numel() for p in trained) / 1e6:.1f} M of "
          f"{sum(p.numel() for p in m.parameters()) / 1e6:.1f} M sdpa={[b.name for b in sdpa]}: {ms:.1f} ms/step {B / ms * 1e3:.2f} img/s  "
          f"peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB", flush=True)


if __name__ == "__main__":
    kind = {"sd35m": Sd35, "flux-lora": Flux}[sys.argv[1]]
    print(torch.__version__, torch.cuda.get_device_name(), torch.backends.cudnn.version())
    for sdpa in ([SDPBackend.CUDNN_ATTENTION], [SDPBackend.FLASH_ATTENTION])[:int(sys.argv[4]) if len(sys.argv) > 4 else None]:
        try:
            bench(kind, int(sys.argv[2]), int(sys.argv[3]), sdpa)
        except Exception as e:
            print("ERR", sys.argv, sdpa, str(e)[:300], flush=True)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
