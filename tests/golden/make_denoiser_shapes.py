#!/usr/bin/env python3
"""Makes tests/golden/denoiser_shapes.safetensors: what diffusers' PixArt gives for latents of other
shapes than its sample_size, as buckets have them.

Usage: python3 tests/golden/make_denoiser_shapes.py [OUT.safetensors]
Needs what make_denoiser.py needs, whose model and inputs these are.
"""
import os
import sys

import torch
from safetensors.numpy import save_file

from make_denoiser import double, make_pixart


def main():
    out, m = {}, make_pixart()
    t, text = torch.tensor([812.5, 3.25, 500.0]).double(), double("text", (3, 6, 20), 1.0)
    mask = torch.arange(6)[None] < torch.tensor([6, 1, 4])[:, None]
    for h, w in (12, 4), (4, 16), (10, 10):
        x = double("x", (3, 4, h, w), 1.5)
        y = m(x, encoder_hidden_states=text, timestep=t, encoder_attention_mask=mask).sample
        out[f"{h}x{w}.out"] = y.detach().numpy()
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "denoiser_shapes.safetensors")
    save_file(out, path)
    print(path, len(out), "tensors")


if __name__ == "__main__":
    main()
