#!/usr/bin/env python3
"""The peer of bench_ranks.sh: DiT in PyTorch on several GPUs, each rank its own batch of latents that lie on its GPU.

Usage: peer_fsdp.py [MODE ...] [--gpus 2] [--batch 256] [--steps 15] [--width 1152] [--depth 28] [--heads 16] [--side 32]
                    [--checkpoint] [--sdpa cudnn] [--device cpu]
MODE    fsdp      FSDP2: fully_shard of every block and of the whole, weights gathered again in the backward (ZeRO-3)
        fsdp2     the same with reshard_after_forward=False (ZeRO-2)
        ddp       DistributedDataParallel, compiled whole (with --gpus 1: no wrapper); bf16 by autocast
        (default: fsdp ddp)

FSDP2: weights in use and activations bf16, gradients reduced in fp32, each block compiled by itself before it is cut, as in
torchtitan. Fused AdamW on fp32 weights, an average (EMA) of them on each rank's part. Timed without and with clip_grad_norm_, since
bench_ranks.sh's steps always compute the norm of all gradients. Prints two lines per mode: ms a step (median), samples/s of all GPUs,
what is allocated at most on a GPU, and what is in use on it (nvidia-smi's figure: with what the allocator keeps, context, NCCL).
--device cpu: tiny, by gloo, to try the script.
"""
import argparse
import os
import statistics
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import peer_dit_xl2

WARM_UP, CLASSES, BUCKET_MB = 4, 1000, 400
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


class Embedding(peer_dit_xl2.TEmb):
    """Its sines in the type that the weights are cast to."""

    def forward(self, t):
        half = self.f // 2
        rate = torch.exp(-9.210340371976184 * torch.arange(half, device=t.device, dtype=torch.float32) / half)
        angle = t[:, None].float() * rate[None]
        return self.mlp(torch.cat([angle.cos(), angle.sin()], -1).to(self.mlp[0].weight.dtype))


peer_dit_xl2.TEmb = Embedding


def median(values):
    return statistics.median(values) if values else float("nan")


def shard(net, args, reshard, compiled):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(net.blocks):
        if args.checkpoint:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        net.blocks[i] = torch.compile(block, fullgraph=True) if compiled else block
        fully_shard(net.blocks[i], mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(net, mp_policy=policy, reshard_after_forward=reshard)
    return net


def build(mode, args, device):
    """The net, what is called, and whether by autocast. Built on the device that holds it in parts: large ones fit no other way."""
    large = mode.startswith("fsdp") and args.width > 2048
    with torch.device("meta" if large else device):
        net = peer_dit_xl2.DiT(depth=args.depth, h=args.width, nh=args.heads, size=args.side, ncls=CLASSES)
    compiled = device.type == "cuda"
    if mode.startswith("fsdp"):
        net = shard(net, args, mode == "fsdp", compiled)
        if large:
            net.to_empty(device=device)
            with torch.no_grad():
                for p in net.parameters():
                    p.to_local().normal_(0, 0.02)
        return net, net, False
    net.ckpt = args.checkpoint
    call = net
    if dist.get_world_size() > 1:
        options = {} if device.type == "cpu" else {"device_ids": [device.index], "bucket_cap_mb": BUCKET_MB}
        call = DistributedDataParallel(net, gradient_as_bucket_view=True, **options)
    return net, torch.compile(call) if compiled else call, True


def local(p):
    return p.to_local() if hasattr(p, "to_local") else p


def measure(mode, args, device):
    torch.manual_seed(0)
    net, call, autocast = build(mode, args, device)
    trained = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0, fused=device.type == "cuda")
    ema = [local(p).detach().clone() for p in trained]
    b, tokens = args.batch, (args.side // 2) ** 2
    x = torch.randn(b, 4, args.side, args.side, device=device)
    y, t = (torch.randint(0, CLASSES, (b,), device=device) for _ in range(2))
    target = torch.randn(b, tokens, 32, device=device)

    def step(clip):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = call(x if autocast else x.bfloat16(), t, y)
        loss = F.mse_loss(out.float(), target)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        torch._foreach_lerp_(ema, [local(p).detach() for p in trained], 1e-4)

    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for clip in (False, True):
        times = []
        for i in range(WARM_UP + args.steps):
            sync()
            begin = time.perf_counter()
            step(clip)
            sync()
            if i >= WARM_UP:
                times.append(1e3 * (time.perf_counter() - begin))
        if dist.get_rank() == 0:
            report(mode + (" clipped" if clip else ""), times, tokens, args, device)


def report(mode, times, tokens, args, device):
    ms, n, b = median(times), dist.get_world_size(), args.batch
    allocated = used = 0.0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        allocated, used = torch.cuda.max_memory_allocated() / 2**30, (total - free) / 2**30
    print(
        f"PyTorch {mode:13s} {n} GPUs {b} each, checkpointing {'on' if args.checkpoint else 'off'}: {ms:.1f} ms "
        f"({min(times):.1f} to {max(times):.1f})  {1e3 * n * b / ms:.1f} samples/s  {1e3 * n * b * tokens / ms:.0f} tokens/s  "
        f"allocated {allocated:.2f} GiB, GPU {used:.2f} GiB",
        flush=True,
    )


def run_rank(rank, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(args.port)
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank, world_size=args.gpus)
    for mode in args.mode:
        try:
            if args.sdpa:
                with sdpa_kernel(BACKENDS[args.sdpa]):
                    measure(mode, args, device)
            else:
                measure(mode, args, device)
        except torch.cuda.OutOfMemoryError as e:
            print(f"PyTorch {mode} rank {rank}: out of memory: {str(e)[:200]}", flush=True)
            break  # the ranks no longer agree on what comes next
        torch._dynamo.reset()
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    os._exit(0)  # a rank that waits for one that has failed is ended with it


def main():
    a = argparse.ArgumentParser()
    a.add_argument("mode", nargs="*", choices=["fsdp", "fsdp2", "ddp", []], default=["fsdp", "ddp"])
    a.add_argument("--checkpoint", action="store_true")
    a.add_argument("--sdpa", choices=BACKENDS)
    a.add_argument("--device", default="cuda")
    for name, value in dict(gpus=2, batch=256, steps=15, width=1152, depth=28, heads=16, side=32, port=29517).items():
        a.add_argument("--" + name, type=int, default=value)
    args = a.parse_args()
    if args.device == "cpu":
        args.width, args.depth, args.heads, args.side, args.batch, args.steps = 64, 3, 4, 8, 4, 3
    if args.device == "cuda":
        print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, NCCL {torch.cuda.nccl.version()}", flush=True)
    mp.spawn(run_rank, (args,), nprocs=args.gpus)


if __name__ == "__main__":
    main()
