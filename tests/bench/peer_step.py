"""The step of bench_step.c in PyTorch: the same PixArt net (adaLN-single, cross-attention), noise,
forward, loss, backward, clip, AdamW; fp32, all cores. Needs Debian's python3-torch.

Usage: peer_step.py [hidden depth heads batch steps]     prints one JSON line
"""
import json, math, os, sys, time
import torch
import torch.nn as nn
import torch.nn.functional as F

hidden, depth, heads, batch, steps = [int(x) for x in sys.argv[1:]] or [128, 4, 4, 16, 30]
L, E, C, S, P = 24, 192, 4, 16, 2
T = (S // P) ** 2


def attention(q, k, v, mask=None):
    B, Tq, D = q.shape
    d = D // heads
    q, k, v = (z.view(B, -1, heads, d).transpose(1, 2) for z in (q, k, v))
    s = q @ k.transpose(-1, -2) * d ** -0.5
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(B, Tq, D)


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        D = hidden
        s.table = nn.Parameter(torch.randn(6, D) / D ** 0.5)
        s.qkv, s.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        s.q2, s.kv2, s.out2 = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        s.fc1, s.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(s, x, text, mask, t6):
        D = (hidden,)
        a, b, g, c, d, h = (s.table[None] + t6).unbind(1)
        y = F.layer_norm(x, D, eps=1e-6) * (1 + b[:, None]) + a[:, None]
        x = x + g[:, None] * s.out(attention(*s.qkv(y).chunk(3, -1)))
        x = x + s.out2(attention(s.q2(x), *s.kv2(text).chunk(2, -1), mask=mask))
        y = F.layer_norm(x, D, eps=1e-6) * (1 + d[:, None]) + c[:, None]
        return x + h[:, None] * s.fc2(F.gelu(s.fc1(y), approximate="tanh"))


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        D = hidden
        s.patch = nn.Conv2d(C, D, P, P)
        s.register_buffer("pos", torch.randn(T, D) * 0.02)
        s.t1, s.t2, s.t6 = nn.Linear(256, D), nn.Linear(D, D), nn.Linear(D, 6 * D)
        s.c1, s.c2 = nn.Linear(E, D), nn.Linear(D, D)
        s.blocks = nn.ModuleList(Block() for _ in range(depth))
        s.table, s.final = nn.Parameter(torch.randn(2, D) / D ** 0.5), nn.Linear(D, P * P * C)

    def forward(s, x, t, text, mask):
        x = s.patch(x).flatten(2).transpose(1, 2) + s.pos
        f = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        a = t[:, None] * f[None]
        emb = s.t2(F.silu(s.t1(torch.cat([a.cos(), a.sin()], -1))))
        t6 = s.t6(F.silu(emb)).view(-1, 6, hidden)
        text = s.c2(F.gelu(s.c1(text), approximate="tanh"))
        for b in s.blocks:
            x = b(x, text, mask, t6)
        shift, scale = (s.table[None] + emb[:, None]).unbind(1)
        x = F.layer_norm(x, (hidden,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
        x = s.final(x).view(-1, S // P, S // P, P, P, C)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, C, S, S)


def main():
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01, foreach=True)
    text = torch.randn(batch, L, E)
    length = torch.tensor([4 + b % 12 for b in range(batch)])
    mask = (torch.arange(L)[None] < length[:, None])[:, None, None]
    mean, t = torch.randn(batch, C, S, S), torch.full((batch,), 500.0)
    times = []
    for step in range(-5, steps):
        start = time.perf_counter()
        x0 = (mean + torch.randn_like(mean)) * 0.75
        e = torch.randn_like(x0)
        loss = F.mse_loss(net(0.5 * x0 + 0.5 * e, t, text, mask), e - x0)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if step >= 0:
            times.append(time.perf_counter() - start)
    times.sort()
    print(json.dumps({"bench": "peer_step", "peer": "torch " + torch.__version__, "hidden": hidden,
                      "depth": depth, "batch": batch, "threads": torch.get_num_threads(),
                      "parameters": sum(p.numel() for p in net.parameters()),
                      "step_ms": round(times[len(times) // 2] * 1e3, 3)}))


main()
