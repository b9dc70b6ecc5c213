# Peer for throughput: the encoder of diffusers' AutoencoderKLLTXVideo of 0.9.0 and 0.9.5 in PyTorch, bf16, random weights, on a clip
# of 121 frames of 512 x 768 (bench_encoders_cuda bf16 ltx): as it comes and through torch.compile, in both memory layouts.
# Usage: python3 peer_ltx_vae.py [ltx|ltx-095 ...]      (both)
# Prints one line per way to run it: ms, frames/s, peak GiB. Compare against the best line.
import sys
import time

import torch
from diffusers import AutoencoderKLLTXVideo

torch.backends.cudnn.benchmark = True
F, H, W, RUNS = 121, 512, 768, 9
CONFIGS = {
    "ltx": dict(),  # diffusers' defaults are 0.9.0's
    "ltx-095": dict(
        block_out_channels=(128, 256, 512, 1024, 2048), down_block_types=("LTXVideo095DownBlock3D",) * 4,
        decoder_block_out_channels=(256, 512, 1024), layers_per_block=(4, 6, 6, 2, 2),
        decoder_layers_per_block=(5, 5, 5, 5), spatio_temporal_scaling=(True,) * 4,
        decoder_spatio_temporal_scaling=(True,) * 3, decoder_inject_noise=(False,) * 4,
        downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        upsample_residual=(True,) * 3, upsample_factor=(2, 2, 2), timestep_conditioning=True),
}


@torch.no_grad()
def bench(name, layout, compiled):
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        encoder = AutoencoderKLLTXVideo(**CONFIGS[name]).encoder.eval().bfloat16()
    encoder = encoder.to(memory_format=layout)
    pixels = torch.randint(0, 256, (1, 3, F, H, W), dtype=torch.uint8, device="cuda")

    def encode(x):
        return encoder((x.bfloat16() / 127.5 - 1).contiguous(memory_format=layout))

    run = torch.compile(encode, dynamic=False) if compiled else encode
    for _ in range(3):
        run(pixels)
    ms = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        t = time.perf_counter()
        run(pixels)
        torch.cuda.synchronize()
        ms.append((time.perf_counter() - t) * 1e3)
    ms = sorted(ms)[RUNS // 2]
    print(f"{name} {'compiled' if compiled else 'eager'} {str(layout)[6:]}: {ms:.1f} ms, {F / ms * 1e3:.0f} frames/s, "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


print(torch.__version__, torch.cuda.get_device_name())
for name in sys.argv[1:] or CONFIGS:
    for compiled in (True, False):
        for layout in (torch.channels_last_3d, torch.contiguous_format):
            try:
                bench(name, layout, compiled)
            except Exception as e:  # a way that does not run is no peer
                print(f"{name} {'compiled' if compiled else 'eager'} {str(layout)[6:]}: {type(e).__name__} {str(e)[:120]}", flush=True)
            torch._dynamo.reset()
