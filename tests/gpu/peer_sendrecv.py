#!/usr/bin/env python3
"""What NCCL's send and receive carry between two GPUs, both ways at once, as nccl-tests' sendrecv_perf does it: grouped, one
communicator, a message after the other. Beside it: bench_hosts_cuda nccl.

usage: peer_sendrecv.py [MB ...]      (16 64 256); NCCL's own variables choose the way (NCCL_P2P_DISABLE=1 ..)
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, sizes):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=rank, world_size=2)
    for mb in sizes:
        out = torch.full((mb * 1000000,), rank, dtype=torch.uint8, device="cuda")
        into = torch.empty_like(out)

        def once():
            ops = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
            for w in dist.batch_isend_irecv(ops):
                w.wait()

        for _ in range(3):
            once()
        torch.cuda.synchronize()
        n = max(4, 1024 // mb)
        begin = time.perf_counter()
        for _ in range(n):
            once()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / n
        if rank == 0:
            print(f"send and receive of {mb} MB: {mb * 1e-3 / seconds:.2f} GB/s each way", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    mp.spawn(run, args=([int(a) for a in sys.argv[1:]] or [16, 64, 256],), nprocs=2)
