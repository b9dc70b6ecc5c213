#!/usr/bin/env python3
"""Draws a caption with a tiny SD3 of random weights, by lg-sample and by diffusers' StableDiffusion3Pipeline in fp64 from the
same noise: tokens, three text encoders, guidance, timesteps, the autoencoder and its shift and scale, all of it.

Once with T5, once without it (text_encoder_3=None, for which diffusers' own encode_prompt gives the rows).

Usage: tests/parity/draw_sd3.py [BIN=build/bin] [SPIECE=examples/emoji/text_encoder/spiece.model]

CLIP's ids are compared with transformers' tokenizer, T5's are lg-encode's. A pixel is a whole number: half a level of rounding
and what fp32 adds, a fiftieth, may lie between. Exits 0 when no pixel is further off. Needs torch, diffusers, transformers,
safetensors, PIL.
"""
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
from diffusers import (AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel,
                       StableDiffusion3Pipeline)
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden"))
from make_denoiser import PURPOSE_SAMPLE, philox_normal  # noqa: E402

SIDE, CHANNELS, STEPS, GUIDANCE, SEED, CLIP_LENGTH, T5_LENGTH = 32, 16, 6, 7.0, 3, 16, 12
BORDER = 2  # of a picture in lg-sample's grid
TOLERANCE = 0.52
CAPTIONS = ["a red circle", ""]
CONFIG = f"""pipeline = "sd3"
[data]
path = "none"
size = {SIDE}
[text.clip_l]
length = {CLIP_LENGTH}
[text.clip_g]
length = {CLIP_LENGTH}
[text.t5]
length = {T5_LENGTH}
"""


def run(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def ids(bin_, at, encoder, length):
    run(f"{bin_}/lg-encode", "text", "--model", f"{at}/sd3/{encoder}", "--length", str(length),
        f"{at}/captions.txt", f"{at}/out.safetensors")
    return load_file(f"{at}/out.safetensors")["token_ids"].long()


def clip(bin_, at, number):
    mine = ids(bin_, at, f"text_encoder{number}", CLIP_LENGTH)
    theirs = CLIPTokenizer.from_pretrained(f"{at}/sd3/tokenizer{number}")(
        CAPTIONS, padding="max_length", max_length=CLIP_LENGTH, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(mine, theirs), f"tokenizer{number}: {mine.tolist()} is not {theirs.tolist()}"
    model = CLIPTextModelWithProjection.from_pretrained(f"{at}/sd3/text_encoder{number}").double().eval()
    out = model(mine, output_hidden_states=True)
    return out.hidden_states[-2], out.text_embeds


def t5_states(bin_, at, without, pipe):
    if without:
        return pipe._get_t5_prompt_embeds(CAPTIONS, max_sequence_length=T5_LENGTH, device="cpu", dtype=torch.float64)
    t5 = T5EncoderModel.from_pretrained(f"{at}/sd3/text_encoder_3").double().eval()
    return t5(ids(bin_, at, "text_encoder_3", T5_LENGTH)).last_hidden_state


def drawn_by_diffusers(bin_, at, without):
    (l, pooled_l), (g, pooled_g) = clip(bin_, at, ""), clip(bin_, at, "_2")
    parts = dict.fromkeys([f"{what}{n}" for what in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")])
    pipe = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel.from_pretrained(f"{at}/sd3/transformer").double().eval(),
        vae=AutoencoderKL.from_pretrained(f"{at}/sd3/vae").double().eval(),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(f"{at}/sd3/scheduler"), **parts)
    pipe.set_progress_bar_config(disable=True)
    t5 = t5_states(bin_, at, without, pipe)
    states = torch.cat([l, g], -1)
    states = torch.cat([torch.nn.functional.pad(states, (0, t5.shape[-1] - states.shape[-1])), t5], -2)
    pooled = torch.cat([pooled_l, pooled_g], -1)
    side = SIDE // 8
    noise = philox_normal(SEED, PURPOSE_SAMPLE, 0, CHANNELS * side * side).reshape(1, CHANNELS, side, side)
    return pipe(prompt_embeds=states[:1], negative_prompt_embeds=states[1:], pooled_prompt_embeds=pooled[:1],
                negative_pooled_prompt_embeds=pooled[1:], latents=torch.from_numpy(noise), height=SIDE, width=SIDE,
                num_inference_steps=STEPS, guidance_scale=GUIDANCE, output_type="np").images[0] * 255


def compare(bin_, at, without):
    with open(f"{at}/p.toml", "w") as f:
        f.write(CONFIG + ('model = ""\n' if without else ""))
    run(f"{bin_}/lg-sample", CAPTIONS[0], "--from", f"{at}/sd3/transformer", "--config", f"{at}/p.toml", "--steps",
        str(STEPS), "--seed", str(SEED), "-o", f"{at}/ours.png")
    ours = np.asarray(Image.open(f"{at}/ours.png").convert("RGB"))[BORDER:-BORDER, BORDER:-BORDER].astype(float)
    theirs = drawn_by_diffusers(bin_, at, without)
    worst = np.abs(ours - theirs).max()
    print(f"{'without' if without else 'with'} T5: {worst:.4f} levels apart at most, of {theirs.std():.0f} that the "
          "picture's levels spread")
    return worst


def main():
    bin_ = sys.argv[1] if len(sys.argv) > 1 else "build/bin"
    spiece = sys.argv[2] if len(sys.argv) > 2 else "examples/emoji/text_encoder/spiece.model"
    with tempfile.TemporaryDirectory() as at, torch.no_grad():
        run(f"{bin_}/lg-random-model", "pipeline", "--preset", "tiny-sd3", "--dtype", "f32", "--spiece", spiece,
            f"{at}/sd3")
        with open(f"{at}/captions.txt", "w") as f:
            f.write("\n".join(CAPTIONS) + "\n")
        off = [compare(bin_, at, without) for without in (False, True)]
    sys.exit(0 if max(off) <= TOLERANCE else 1)


main()
