# Peer for throughput: diffusers' U-Nets of SD 2.1 with all weights trained and of SDXL with a LoRA on its attentions, in PyTorch, bf16,
# torch.compile, channels last, fused AdamW, without EMA (as bench_step_cuda). Random weights.
# Usage: python3 peer_unet.py sd21|sdxl-lora SIDE BATCH      SIDE: of the latent (64: 512 px)
# PEER_BLOCKS=1: compiled block by block, in minutes less.
# Prints one line per way to run it: ms/step, img/s, peak GiB. Compare against the best line.
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")

SD21 = dict(
    sample_size=64, cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True,
    block_out_channels=(320, 640, 1280, 1280), layers_per_block=2)
SDXL = dict(
    sample_size=128, cross_attention_dim=2048, attention_head_dim=[5, 10, 20], use_linear_projection=True,
    block_out_channels=(320, 640, 1280), layers_per_block=2, transformer_layers_per_block=[1, 2, 10],
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816)


class Lora(nn.Module):
    """A frozen linear in bf16 with an adapter in fp32."""

    def __init__(s, base, rank=16):
        super().__init__()
        s.base = base
        s.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        s.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.02)

    def forward(s, x):
        return s.base(x) + F.linear(F.linear(x, s.a), s.b)


def add_adapters(m):
    m.bfloat16().requires_grad_(False)
    for name, part in list(m.named_modules()):
        if name.endswith(("attn1", "attn2")):
            for k in ("to_q", "to_k", "to_v"):
                setattr(part, k, Lora(getattr(part, k)))
            part.to_out[0] = Lora(part.to_out[0])


def compiled(m):
    if not os.environ.get("PEER_BLOCKS"):
        return torch.compile(m)
    torch._dynamo.config.recompile_limit = 64  # a block's code is one for all channels and sides
    for part in m.modules():
        if type(part).__name__ in ("BasicTransformerBlock", "ResnetBlock2D"):
            part.compile()
    return m


def bench(name, side, B, sdpa, benchmark, iters=10):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = benchmark
    lora = name == "sdxl-lora"
    with torch.device("cuda"):
        m = UNet2DConditionModel(**(SDXL if lora else SD21))
        if lora:
            add_adapters(m)
    m = m.to(memory_format=torch.channels_last).train()
    trained = [p for p in m.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0, fused=True)
    f = compiled(m)
    like = dict(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(B, 4, side, side, **like).contiguous(memory_format=torch.channels_last)
    text = torch.randn(B, 77, 2048 if lora else 1024, **like)
    more = dict(text_embeds=torch.randn(B, 1280, **like), time_ids=torch.full((B, 6), 1024.0, **like)) if lora else None
    t, target = torch.randint(0, 1000, (B,), device="cuda"), torch.randn(B, 4, side, side, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            o = f(x, t, text, added_cond_kwargs=more, return_dict=False)[0]
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
    print(f"{name} {8 * side} px B={B} trained={sum(p.numel() for p in trained) / 1e6:.1f} M of "
          f"{sum(p.numel() for p in m.parameters()) / 1e6:.1f} M sdpa={[b.name for b in sdpa]} cudnn.benchmark={benchmark}: {ms:.1f} ms/step "
          f"{B / ms * 1e3:.2f} img/s  peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB", flush=True)


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name(), torch.backends.cudnn.version())
    ways = [([SDPBackend.CUDNN_ATTENTION], True), ([SDPBackend.FLASH_ATTENTION], True), ([SDPBackend.CUDNN_ATTENTION], False)]
    for sdpa, benchmark in ways[:int(sys.argv[4]) if len(sys.argv) > 4 else None]:
        try:
            bench(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sdpa, benchmark)
        except Exception as e:
            print("ERR", sys.argv, sdpa, str(e)[:300], flush=True)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
