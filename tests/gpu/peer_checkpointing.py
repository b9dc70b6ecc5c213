#!/usr/bin/env python3
"""The peer of bench_memory_cuda: the same training step in PyTorch, with the activations of no block, of every 4th, of every
2nd and of all blocks checkpointed (the table of diffusers' pull request #10611).

Usage: peer_checkpointing.py [WIDTH DEPTH HEADS SIDE BATCH [STEPS]]      (2048 28 16 100 1 10)

bf16 by autocast on fp32 weights, fused AdamW, blocks compiled, their checkpoints around them. Prints for each row: GiB that are
allocated at most, of it what is there between steps (weights, moments), ms a step (median and range). On a machine without a GPU
a tiny net, to try the script.
"""
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import peer_pixart

TEXT, WARM_UP = 128, 3
ROWS = {"none": 0, "every:4": 4, "every:2": 2, "block": 1}


class Blocks(torch.nn.ModuleList):
    """Of these every n-th is checkpointed."""

    every = 0

    def __iter__(self):
        for i, block in enumerate(super().__iter__()):
            if self.every and i % self.every == 0:
                yield lambda *a, block=block: checkpoint(block, *a, use_reentrant=False, preserve_rng_state=False)
            else:
                yield block


def main():
    given = [int(a) for a in sys.argv[1:]]
    width, depth, heads, side, batch, steps = (given + [2048, 28, 16, 100, 1, 10][len(given):])[:6]
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if not cuda:
        width, depth, heads, side, batch, steps = 64, 5, 4, 8, 2, 2
    torch.manual_seed(0)
    net = peer_pixart.PixArt(side, depth, width, heads).to(device)
    net.blocks = Blocks(net.blocks)
    if cuda:
        for block in torch.nn.ModuleList.__iter__(net.blocks):
            block.compile()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-6, weight_decay=0, fused=cuda)
    x = torch.randn(batch, 4, side, side, device=device)
    text = torch.randn(batch, TEXT, peer_pixart.WIDTH, device=device, dtype=torch.bfloat16)
    t = torch.randint(0, 1000, (batch,), device=device)
    target = torch.randn(batch, (side // 2) ** 2, 16, device=device)
    sync = torch.cuda.synchronize if cuda else lambda: None

    def step():
        with torch.autocast(device, torch.bfloat16):
            out = net(x, t, text, None)
        F.mse_loss(out.float(), target).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    count = sum(p.numel() for p in net.parameters())
    name = torch.cuda.get_device_name() if cuda else "cpu"
    print(f"PyTorch {torch.__version__}, {name}: width {width}, depth {depth}, {heads} heads, {(side // 2) ** 2} tokens, "
          f"batch {batch}, {count * 1e-9:.2f} G parameters", flush=True)
    for row, every in ROWS.items():
        net.blocks.every = every
        for _ in range(WARM_UP):
            step()
        sync()
        between = torch.cuda.memory_allocated() / 2**30 if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            sync()
            times.append(1e3 * (time.perf_counter() - begin))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0
        times.sort()
        print(f"PyTorch {row:8s} {peak:7.2f} GiB, between steps {between:.2f}  {times[len(times) // 2]:8.1f} ms "
              f"({times[0]:.1f} to {times[-1]:.1f})", flush=True)


if __name__ == "__main__":
    main()
