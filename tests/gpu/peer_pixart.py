# Peer for throughput: PixArt-Sigma's transformer in PyTorch, bf16 autocast, torch.compile, fused AdamW, without EMA (as bench_step_cuda).
# Usage: python3 peer_pixart.py SIDE BATCH [MASK]      SIDE: of the latent (64: 512 px, 128: 1024 px); MASK: 1 (default): text keys are
# masked by length, as in training; 0: all 300 keys count, which is less work than a user has.
# Prints one line per SDPA backend: ms/step, img/s, peak GiB. Compare against the best line.
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer_dit_xl2 import TEmb, mod

torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
TEXT, WIDTH = 300, 4096


class Block(nn.Module):
    def __init__(s, h, nh):
        super().__init__()
        s.nh = nh
        s.n1 = nn.LayerNorm(h, elementwise_affine=False, eps=1e-6)
        s.qkv, s.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        s.q, s.kv, s.proj2 = nn.Linear(h, h), nn.Linear(h, 2 * h), nn.Linear(h, h)
        s.n2 = nn.LayerNorm(h, elementwise_affine=False, eps=1e-6)
        s.fc1, s.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        s.table = nn.Parameter(torch.randn(6, h) / h ** 0.5)

    def forward(s, x, t6, text, mask):
        a, b, g, d, e, f = (s.table[None] + t6).unbind(1)
        B, N, C = x.shape
        q, k, v = s.qkv(mod(s.n1(x), a, b)).reshape(B, N, 3, s.nh, C // s.nh).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + g[:, None] * s.proj(o)
        q = s.q(x).reshape(B, N, s.nh, C // s.nh).transpose(1, 2)
        k, v = s.kv(text).reshape(B, -1, 2, s.nh, C // s.nh).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, N, C)
        x = x + s.proj2(o)
        return x + f[:, None] * s.fc2(F.gelu(s.fc1(mod(s.n2(x), d, e)), approximate="tanh"))


class PixArt(nn.Module):
    def __init__(s, side, depth=28, h=1152, nh=16, p=2):
        super().__init__()
        s.x = nn.Conv2d(4, h, p, p)
        s.t, s.t6 = TEmb(h), nn.Linear(h, 6 * h)
        s.text1, s.text2 = nn.Linear(WIDTH, h), nn.Linear(h, h)
        s.register_buffer("pos", torch.randn(1, (side // p) ** 2, h) * 0.02)
        s.blocks = nn.ModuleList([Block(h, nh) for _ in range(depth)])
        s.nf = nn.LayerNorm(h, elementwise_affine=False, eps=1e-6)
        s.table = nn.Parameter(torch.randn(2, h) / h ** 0.5)
        s.lin = nn.Linear(h, p * p * 4)

    def forward(s, x, t, text, mask):
        x = s.x(x).flatten(2).transpose(1, 2) + s.pos
        e = s.t(t)
        t6 = s.t6(F.silu(e)).reshape(x.shape[0], 6, -1)
        text = s.text2(F.gelu(s.text1(text), approximate="tanh"))
        for b in s.blocks:
            x = b(x, t6, text, mask)
        a, b = (s.table[None] + e[:, None]).unbind(1)
        return s.lin(mod(s.nf(x), a, b))


def bench(side, B, masked, sdpa, iters=12):
    torch.manual_seed(0)
    m = PixArt(side).cuda()
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4, weight_decay=0, fused=True)
    f = torch.compile(m)
    x = torch.randn(B, 4, side, side, device="cuda")
    text = torch.randn(B, TEXT, WIDTH, device="cuda", dtype=torch.bfloat16)
    lengths = 1 + torch.arange(B, device="cuda") * 389 % TEXT
    mask = (torch.arange(TEXT, device="cuda")[None] < lengths[:, None])[:, None, None] if masked else None
    t = torch.randint(0, 1000, (B,), device="cuda")
    target = torch.randn(B, (side // 2) ** 2, 16, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            o = f(x, t, text, mask)
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
    print(f"PixArt {8 * side} px B={B} mask={masked} sdpa={[b.name for b in sdpa]}: {ms:.1f} ms/step {B / ms * 1e3:.1f} img/s  "
          f"peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB", flush=True)


if __name__ == "__main__":
    side, B = int(sys.argv[1]), int(sys.argv[2])
    masked = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    print(torch.__version__, torch.cuda.get_device_name(), torch.backends.cudnn.version())
    both = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for sdpa in (both, [SDPBackend.CUDNN_ATTENTION])[:int(sys.argv[4]) if len(sys.argv) > 4 else None]:
        try:
            bench(side, B, masked, sdpa)
        except Exception as e:
            print("ERR", B, masked, sdpa, str(e)[:300], flush=True)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
