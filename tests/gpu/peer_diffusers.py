# Peer for throughput: diffusers' own classes as a training script uses them, where peer_mmdit.py and peer_ltx.py are nets written for
# speed (q, k, v in one product): FLUX.1-dev with a LoRA of rank 16 on its attentions, computed as peft does, SD3.5-medium and
# LTX-Video's transformer with all weights trained. bf16 autocast, torch.compile block by block (diffusers' "regional compilation"),
# fused AdamW, without EMA (as bench_step_cuda). Random weights. Timed without and with clip_grad_norm_, which diffusers' own training
# scripts call in every step; bench_step_cuda computes the gradients' norm in each.
# Usage: python3 peer_diffusers.py flux-lora|sd35m SIDE BATCH [WAYS]     SIDE: of the latent (128: 1024 px)
#        python3 peer_diffusers.py ltx FRAMESxHEIGHTxWIDTH BATCH [WAYS]  of the latent: 13x12x16 has 2,496 tokens, 16x25x40 16,000
#        WAYS: backends of SDPA, of cudnn,flash (default both; PyTorch 2.11 itself takes cudnn on an H200)
#        `tiny` in place of a side: a small net on the CPU, to try the script
# Prints two lines per SDPA backend, without and with clipping: ms/step, samples/s, peak GiB. Compare against the best line.
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel, LTXVideoTransformer3DModel, SD3Transformer2DModel
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
torch._dynamo.config.recompile_limit = 64
TINY = len(sys.argv) > 2 and sys.argv[2] == "tiny"
DEVICE = "cpu" if TINY else "cuda"
LIKE = dict(device=DEVICE, dtype=torch.bfloat16)
BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock", "JointTransformerBlock", "LTXVideoTransformerBlock")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class Lora(nn.Module):
    """A frozen linear in bf16 with an adapter in fp32, as peft's."""

    def __init__(self, base, rank=16):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, device=DEVICE) * 0.02)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank, device=DEVICE) * 0.02)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)


def add_adapters(net):
    net.bfloat16().requires_grad_(False)
    for name, linear in list(net.named_modules()):
        if isinstance(linear, nn.Linear) and ".attn." in name and name.endswith(ATTENTION):
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, Lora(linear))


def flux(side, batch):
    small = dict(num_layers=1, num_single_layers=2, attention_head_dim=32, num_attention_heads=2, joint_attention_dim=32,
                 pooled_projection_dim=16, axes_dims_rope=(8, 12, 12)) if TINY else {}
    net = FluxTransformer2DModel(guidance_embeds=True, **small)
    add_adapters(net)
    side, c = side // 2, net.config
    ids = torch.zeros(side, side, 3)
    ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)
    t = torch.rand(batch, **LIKE)
    return net, (batch, side * side, 64), dict(
        encoder_hidden_states=torch.randn(batch, 512, c.joint_attention_dim, **LIKE), pooled_projections=torch.randn(batch, c.pooled_projection_dim, **LIKE),
        timestep=t, guidance=torch.full_like(t, 3.5), img_ids=ids.view(-1, 3).to(**LIKE), txt_ids=torch.zeros(512, 3, **LIKE))


def sd35m(side, batch):
    small = dict(num_layers=2, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=128, pooled_projection_dim=16,
                 dual_attention_layers=(0,)) if TINY else dict(
        num_layers=24, num_attention_heads=24, caption_projection_dim=1536, dual_attention_layers=tuple(range(13)))
    net = SD3Transformer2DModel(sample_size=side, pos_embed_max_size=384, qk_norm="rms_norm", **small)
    c = net.config
    return net, (batch, 16, side, side), dict(
        encoder_hidden_states=torch.randn(batch, 333, c.joint_attention_dim, **LIKE), pooled_projections=torch.randn(batch, c.pooled_projection_dim, **LIKE),
        timestep=torch.rand(batch, **LIKE) * 1000)


def ltx(size, batch):
    frames, height, width = size
    small = dict(num_layers=2, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64, caption_channels=32) if TINY else {}
    net = LTXVideoTransformer3DModel(**small)
    tokens = frames * height * width
    return net, (batch, tokens, 128), dict(
        encoder_hidden_states=torch.randn(batch, 128, net.config.caption_channels, **LIKE), timestep=torch.rand(batch, 1, device=DEVICE) * 1000,
        encoder_attention_mask=torch.ones(batch, 128, device=DEVICE), num_frames=frames, height=height, width=width)


def bench(make, size, batch, sdpa, iterations):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        net, shape, more = make(size, batch)
    net = net.to(DEVICE).train()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0, fused=True)
    for part in net.modules():
        if type(part).__name__ in BLOCKS:
            part.compile()
    x, target = torch.randn(shape, **LIKE), torch.randn(shape, device=DEVICE)

    def step(clip=False):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = net(x, return_dict=False, **more)[0]
        F.mse_loss(out.float(), target).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with sdpa_kernel(sdpa):
        for i in range(4):
            step(clip=i == 3)
        if TINY:
            print(sys.argv[1], "trains", sum(p.numel() for p in trained), "of", sum(p.numel() for p in net.parameters()))
            return
        for clip in (False, True):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            times = []
            for _ in range(iterations):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                step(clip)
                b.record()
                b.synchronize()
                times.append(a.elapsed_time(b))
            times.sort()
            ms = times[len(times) // 2]
            print(f"diffusers {sys.argv[1]} {sys.argv[2]} B={batch} trained={sum(p.numel() for p in trained) / 1e6:.1f} M of "
                  f"{sum(p.numel() for p in net.parameters()) / 1e6:.1f} M sdpa={[b.name for b in sdpa]}{' clipped' if clip else ''}: "
                  f"{ms:.1f} ms/step ({times[0]:.1f} to {times[-1]:.1f}) {batch / ms * 1e3:.2f} samples/s  "
                  f"peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB", flush=True)


if __name__ == "__main__":
    import diffusers
    print(torch.__version__, diffusers.__version__, DEVICE if TINY else torch.cuda.get_device_name())
    kind, size, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    make = {"flux-lora": flux, "sd35m": sd35m, "ltx": ltx}[kind]
    size = ((2, 4, 4) if kind == "ltx" else 8) if TINY else tuple(map(int, size.split("x"))) if kind == "ltx" else int(size)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    names = sys.argv[4].split(",") if len(sys.argv) > 4 else list(backends)
    for sdpa in [SDPBackend.MATH] if TINY else [backends[n] for n in names]:
        try:
            # What a backend does not take (a mask) goes to the next one.
            bench(make, size, batch, [sdpa] if TINY else [sdpa, SDPBackend.EFFICIENT_ATTENTION], 12)
        except Exception as e:
            print("ERR", sys.argv, sdpa, str(e)[:300], flush=True)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
