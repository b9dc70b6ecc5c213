#!/usr/bin/env python3
"""Whole nets at full size against PyTorch in fp64: this system's programs and a PyTorch that shares no code
with them get the same random weights and inputs, rounded to bf16 first.

  dit, pixart   DiT-XL/2 (batch 1 and 2) and PixArt-XL/2 (77 and 300 text tokens, of different lengths in a
                batch): the output, and the gradient of every parameter for a random gradient of the output
  sd3           blocks of SD3.5-medium (4, two of them with a second attention), as DiT
  flux          blocks of FLUX.1-dev (1 of two streams, 2 of one), as DiT
  latte, ltx    blocks of Latte-1 (2, and as many along time; 16 frames of 256 px) and of LTX-Video (2; 13 frames of 384 x 512
                px), as DiT
  sd2, sdxl     the U-Nets of Stable Diffusion 2.1 at 512 px and of SDXL at 1024, against diffusers' own class, and
                both at two odd sizes
  vae           Stable Diffusion's autoencoder at 128, 256, 512 pixels: mean and logvar, and the picture
  t5            the encoder of a T5 v1.1 of XXL's width, 4 layers (--t5-layers): 77 and 120 ids, padded
  clip          the text encoder of CLIP L: 77 and 20 ids

Usage: parity_nets.py BUNDLE [--device cuda|host] [--only dit,pixart,sd3,flux,latte,ltx,sd2,sdxl,vae,t5,clip] [--tiny] [--t5-layers 4]
                      [--draws 8] [--jobs 3] [--work DIR]

The error of a tensor is its distance to fp64 in the 2-norm, relative to fp64's norm. Beside it stands the
error of PyTorch itself in that precision. Must hold, per tensor: fp32 at most 1e-5; bf16 at most 1.2 times
PyTorch's bf16. Told, not failed: tensors above 3e-4 in tf32 and above 1e-2 in bf16. The biases of keys have
no gradient but rounding: they count relative to the tensors' root mean square norm, and have no ratio.

The gradients of PixArt's biases of queries are sums over all tokens of what nearly cancels, so that a ratio of two
draws of rounding scatters (one tensor in four draws, 77 text tokens: 0.93, 1.21, 1.27, 0.66 times PyTorch's; over
four draws together one of 28 such biases was still at 1.22 in one of two runs, at 1.05 in the other). So
PixArt gets --draws inputs in bf16, and an error is the root mean square over them, on both sides, before the ratio
is taken. A draw in which PyTorch's gradient of a tensor is not finite does not count for that one; it is told.
SDXL's 1,680 gradients scatter as much (one draw at two sizes: 0.82 times PyTorch's in the median, fifteen of them above 1.2), so it gets half as many
draws, in fp32 as well. At its published size PyTorch in fp64 wants a GPU of 140 GB, for one sample, alone: our runs wait meanwhile.
--t5-layers 24 wants --jobs 1: XXL in fp32 has 19 GB. --device host --tiny: small nets on the CPU, to try
the script. Prints one line per net and precision, and
"N passed, M failed"; exits 1 when one failed. Needs torch and numpy, and diffusers for the U-Nets.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import torch

from peer_clip import clip, clip_files
from peer_clips import Clip, clip_files as clips_files, clip_inputs, clip_net
from peer_flux import Flux, flux, flux_files, flux_inputs
from peer_nets import (Mmdit, Random, Trunk, decode, encode, read, sd3, sd3_files, sd3_inputs, t5, t5_files, trunk, trunk_files, trunk_inputs,
                       trunk_weights, vae_files, write)

Precision = collections.namedtuple("Precision", "name device dtype bound hard")
CUDA = [Precision("fp32", "cuda:0", torch.float32, 1e-5, True),
        Precision("tf32", "cuda:0", torch.float32, 3e-4, False),
        Precision("bf16", "cuda:0", torch.bfloat16, 1e-2, False)]
HOST = [Precision("fp32", "host", torch.float32, 1e-5, True), Precision("ref64", "ref64", torch.float32, 1e-6, True)]
RATIO = 1.2


# ---- cases ----

# One net and its inputs, of which the first goes through every precision, the others through bf16, of a deep net (a U-Net, a hundred
# layers) through fp32, too: our program's command line, the PyTorch function, our runs by (input, precision).
# alone: PyTorch has the GPU for itself.
Case = collections.namedtuple("Case", "name model inputs command theirs runs deep alone", defaults=[False, False])


def trunk_case(c, name, folder, w, batch, random, draws=1):
    def theirs(dtype, device, inputs):
        p = {k: v.to(dtype).requires_grad_() for k, v in w.items()}
        x = {k: v.to(device) for k, v in inputs.items()}
        x = {k: v.to(dtype) if k in ("x", "text", "dout") else v for k, v in x.items()}
        dout = x.pop("dout")
        out = trunk(p, c, **x)
        grads = torch.autograd.grad(out, list(p.values()), dout)
        return {"out": out.detach()} | {f"grad.{k}": g for k, g in zip(p, grads)}

    return Case(name, folder, [trunk_inputs(c, batch, random) for _ in range(draws)],
                lambda model, i, o, p: ["lg-forward", model, i, o, p.device] +
                ([p.name] if p.device == "cuda:0" else []), theirs, {})


def encoder_case(name, folder, inputs, words, function):
    def command(model, i, o, p):
        precision = ["--precision", p.name] if p.device == "cuda:0" else []
        batch = str(next(iter(inputs.values())).shape[0])
        return ["lg-encode", *words, "--model", model, "--device", p.device, *precision, "--batch", batch, i, o]

    def theirs(dtype, device, inputs):
        with torch.no_grad():
            return function(dtype, {k: v.to(device) for k, v in inputs.items()})

    return Case(name, folder, [inputs], command, theirs, {})


def trunk_cases(kind, a, work, random):
    xl, out, w = not a.tiny, [], None
    size = (1152, 28, 16, 32) if xl else (64, 2, 4, 8)
    if kind == "dit":
        c = Trunk("dit", *size, 0, 0, 1000 if xl else 5)
        w = trunk_weights(c, random)
        trunk_files(f"{work}/dit", c, w)
        return [trunk_case(c, f"DiT {size[1]} x {size[0]}, batch {b}", f"{work}/dit", w, b, random) for b in (2, 1)]
    for text in (77, 300):
        c = Trunk("pixart", *size, text, 4096 if xl else 48, 0)
        if not w:
            w = trunk_weights(c, random)
            trunk_files(f"{work}/pixart", c, w)
        name = f"PixArt {size[1]} x {size[0]}, {text} tokens"
        out.append(trunk_case(c, name, f"{work}/pixart", w, 2, random, a.draws))
    return out


def joint_case(name, folder, w, trained, inputs, function):
    """SD3 or FLUX: function(parameters, inputs)."""
    def theirs(dtype, device, inputs):
        p = {k: v.to(dtype).requires_grad_(k in trained) for k, v in w.items()}
        x = {k: v.to(device) if k in ("t", "size", "guidance", "text_length") else v.to(device, dtype) for k, v in inputs.items()}
        out = function(p, x)
        names = sorted(trained)
        grads = torch.autograd.grad(out, [p[k] for k in names], x["dout"])
        return {"out": out.detach()} | {f"grad.{k}": g for k, g in zip(names, grads)}

    return Case(name, folder, [inputs], lambda model, i, o, p: ["lg-forward", model, i, o, p.device] +
                ([p.name] if p.device == "cuda:0" else []), theirs, {})


def clips_cases(kind, a, work, random):
    if kind == "latte":
        c = Clip(kind, 48, 2, 4, 4, (3, 8, 12), 7, 24) if a.tiny else Clip(kind, 1152, 2, 16, 4, (16, 32, 32), 120, 4096)
    else:
        c = Clip(kind, 64, 2, 4, 8, (3, 5, 7), 7, 24) if a.tiny else Clip(kind, 2048, 2, 32, 128, (13, 12, 16), 128, 4096)
    w = clips_files(f"{work}/{kind}", c, random)
    name = f"{kind.upper() if kind == 'ltx' else 'Latte'} {c.depth} x {c.hidden}, batch 2"
    return [joint_case(name, f"{work}/{kind}", w, set(w), clip_inputs(c, 2, random), lambda p, x: clip_net(p, c, x))]


def flux_cases(a, work, random):
    c = Flux(64, 2, 2, 4, 8, 5, 48, 24, [4, 6, 6]) if a.tiny else \
        Flux(3072, 1, 2, 24, 64, 512, 4096, 768, [16, 56, 56])
    w = flux_files(f"{work}/flux", c, random)
    return [joint_case(f"FLUX {c.doubles} + {c.singles} x {c.hidden}, batch 2", f"{work}/flux", w, set(w),
                       flux_inputs(c, 2, random), lambda p, x: flux(p, c, x))]


def sd3_cases(a, work, random):
    c = Mmdit(64, 3, 4, 8, 1, [3, 3, 5], [16, 24, 48], [16, 24], 9) if a.tiny else \
        Mmdit(1536, 4, 24, 64, 2, [77, 77, 256], [768, 1280, 4096], [768, 1280], 96)
    w = sd3_files(f"{work}/sd3", c, random)
    trained = {k for k in w if k != "pos_embed.pos_embed" and
               f"blocks.{c.depth - 1}.attn.add_q" not in k and f"blocks.{c.depth - 1}.attn.norm_added_q" not in k}

    return [joint_case(f"SD3 {c.depth} x {c.hidden}, batch 2", f"{work}/sd3", w, trained, sd3_inputs(c, 2, random),
                       lambda p, x: sd3(p, c, x))]


def unet_cases(kind, a, work, random):
    from peer_unets import unet, unet_config, unet_files, unet_inputs
    config = unet_config(kind, a.tiny)
    w, out = unet_files(f"{work}/{kind}", config, random), []
    published = config["sample_size"] // (4 if a.tiny else 1)
    for height, width in ((published, published), (33, 47), (57, 35)) if not a.tiny else ((published, published), (13, 19)):
        folder = f"{work}/{kind}-{height}x{width}"
        os.makedirs(folder)
        with open(f"{work}/{kind}/config.json") as f:
            text = json.load(f)
        with open(f"{folder}/config.json", "w") as f:
            json.dump(text | {"_sample_height": height, "_sample_width": width}, f)
        os.link(f"{work}/{kind}/diffusion_pytorch_model.safetensors", f"{folder}/diffusion_pytorch_model.safetensors")
        alone = kind == "sdxl" and height == published
        batch = 1 if alone else 2
        inputs = [unet_inputs(config, height, width, random, a.tiny, batch) for _ in range(max(a.draws // 2, 1) if kind == "sdxl" else 1)]
        out.append(joint_case(f"{kind.upper()}'s U-Net, {8 * height} x {8 * width} px, batch {batch}", folder, w, set(w), inputs[0],
                              lambda p, x: unet(p, config, x))._replace(inputs=inputs, deep=True, alone=alone))
    return out


def vae_cases(a, work, random):
    c = dict(channels=[32, 32, 64, 64], layers=1) if a.tiny else dict(channels=[128, 256, 512, 512], layers=2)
    w, out, g = vae_files(f"{work}/vae", c, random), [], torch.Generator().manual_seed(3)

    def function(half, key):
        return lambda dtype, x: half({k: v.to(dtype) for k, v in w.items()}, c,
                                     x[key] if key == "pixels" else x[key].to(dtype))

    for side in (32, 64) if a.tiny else (128, 256, 512):
        n = 1 if side == 512 else 2
        pixels = torch.randint(0, 256, (n, 3, side, side), generator=g, dtype=torch.uint8)
        latent = random((n, 4, side // 8, side // 8), 1).float()
        out.append(encoder_case(f"VAE encoder, {side} px", f"{work}/vae", {"pixels": pixels}, ["vae"],
                                function(encode, "pixels")))
        out.append(encoder_case(f"VAE decoder, {side} px", f"{work}/vae", {"latent_mean": latent}, ["decode", "vae"],
                                function(decode, "latent_mean")))
    return out


def t5_cases(a, work, random):
    c = dict(d=64, d_kv=16, ff=128, heads=4, layers=2, vocab=256) if a.tiny else \
        dict(d=4096, d_kv=64, ff=10240, heads=64, layers=a.t5_layers, vocab=2048)
    w, out, g = t5_files(f"{work}/t5", c, random), [], torch.Generator().manual_seed(4)
    for length in (77, 120):
        ids = torch.randint(1, c["vocab"], (3, length), generator=g, dtype=torch.int32)
        for i, n in enumerate((length, 5, length // 2)):
            ids[i, n:] = 0
        name = f"T5 {c['layers']} x {c['d']}, {length} ids"
        out.append(encoder_case(name, f"{work}/t5", {"token_ids": ids}, ["text"],
                                lambda dtype, x: t5(w, c, x["token_ids"], lambda v: v.to(dtype))))
    return out


def clip_cases(a, work, random):
    c = dict(d=64, heads=4, layers=2, vocab=256) if a.tiny else dict(d=768, heads=12, layers=12, vocab=2048)
    w, g = clip_files(f"{work}/clip", c, random), torch.Generator().manual_seed(5)
    out = []
    for length in (77, 20):
        ids = torch.randint(1, c["vocab"] - 2, (3, length), generator=g, dtype=torch.int32)
        ids[:, 0], ids[:, -1] = c["vocab"] - 2, c["vocab"] - 1
        out.append(encoder_case(f"CLIP {c['layers']} x {c['d']}, {length} ids", f"{work}/clip", {"token_ids": ids},
                                ["text"], lambda dtype, x: clip(w, c, x["token_ids"], lambda v: v.to(dtype))))
    return out


# ---- both sides, compared ----

def ours(a, work, case, number, precision):
    """Runs our program; the path of its output."""
    at = f"{work}/{number}.{precision.name}"
    env = dict(os.environ, LG_CUDA_CACHE=f"{at}.algorithms")
    command = case.command(case.model, f"{work}/{number}.in.safetensors", f"{at}.safetensors", precision)
    command[0] = f"{a.bundle}/bin/{command[0]}"
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr.strip()}")
    return f"{at}.safetensors"


def distances(got, want, norms, floor):
    """name -> relative error. No gradient but rounding, for biases of keys: relative to `floor`."""
    out = {}
    for name, x in want.items():
        y = got[name].to(x.device)
        assert y.shape == x.shape, (name, y.shape, x.shape)
        scale = floor if name.endswith("to_k.bias") else norms[name]
        error = float((y.double() - x).norm()) / scale
        out[name] = error if math.isfinite(error) else math.inf
    return out


def short(name):
    return name.removeprefix("grad.").replace("transformer_blocks.", "")


def over_draws(errors, where=None):
    """Root mean squares; where: draws that count for a tensor, by default all."""
    out = {}
    for k in errors[0]:
        e = [x[k] for i, x in enumerate(errors) if not where or i in where[k]]
        out[k] = math.sqrt(sum(x * x for x in e) / len(e)) if e else math.nan
    return out


def judge(case, p, mine, theirs):
    """Prints the line; how many tensors passed and failed. mine, theirs: by draw."""
    draws = len(mine)
    finite = {k: [i for i in range(draws) if math.isfinite(theirs[i][k])] for k in mine[0]}
    lost = sum(len(i) < draws for i in finite.values())  # PyTorch has no number there
    beside, mine, theirs = over_draws(mine, finite), over_draws(mine), over_draws(theirs, finite)
    worst = max(mine, key=mine.get)
    above = sum(e > p.bound for e in mine.values())
    bad = {k: f"error {e:.2e}" for k, e in mine.items() if not e <= p.bound} if p.hard else {}
    line = f"{case.name:28} {p.name:5} {len(mine):4} tensors  "
    if draws > 1:
        line += f"{draws} draws  "
    if len(mine) > 2:
        rms = math.sqrt(sum(e * e for e in mine.values()) / len(mine))
        line += f"out {mine['out']:.2e}  rms {rms:.2e}  "
    line += f"largest {mine[worst]:.2e} {short(worst)} (PyTorch's {theirs[worst]:.2e}, " \
            f"largest {max(theirs.values()):.2e})"
    if lost:
        line += f"; in {lost} PyTorch's are not finite in every draw"
    if above:
        line += f"; {above} above {p.bound:g}"
    if p.name == "bf16":
        ratio = {k: beside[k] / theirs[k] if theirs[k] and math.isfinite(mine[k]) else math.inf for k in mine
                 if not k.endswith("to_k.bias")}
        bad |= {k: f"{r:.2f} times PyTorch's bf16 error {theirs[k]:.2e}" for k, r in ratio.items() if not r <= RATIO}
        at, median = max(ratio, key=ratio.get), sorted(ratio.values())[len(ratio) // 2]
        line += f"; over PyTorch's: median {median:.2f}, largest {ratio[at]:.2f} {short(at)}"
    print(("FAIL " if bad else "ok   ") + line)
    for name in sorted(bad, key=lambda k: -mine[k])[:4]:
        print(f"     {short(name)}: {bad[name]}")
    sys.stdout.flush()
    return len(mine) - len(bad), len(bad)


class Turns:
    """Our runs on the GPU, or PyTorch alone there."""

    def __init__(self):
        self.changed, self.runs, self.alone = threading.Condition(), 0, False

    @contextlib.contextmanager
    def ours(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.alone)
            self.runs += 1
        try:
            yield
        finally:
            with self.changed:
                self.runs -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def pytorch(self, alone, awaited):
        if alone:
            concurrent.futures.wait(awaited)
            with self.changed:
                self.alone = True
                self.changed.wait_for(lambda: self.runs == 0)
        try:
            yield
        finally:
            if alone:
                torch.cuda.empty_cache()
                with self.changed:
                    self.alone = False
                    self.changed.notify_all()


def check(case, device, room, turns):
    mine, theirs, failed = {}, {}, 0
    for draw in range(len(case.inputs)):
        precisions = [p for at, p in case.runs if at == draw]
        if precisions:
            with turns.pytorch(case.alone, [case.runs[draw, p] for p in precisions]):
                failed += compare(case, draw, precisions, mine, theirs, device, room)
    results = [judge(case, p, mine[p], theirs[p]) for p in mine]
    return sum(good for good, _ in results), sum(bad for _, bad in results) + failed


def compare(case, draw, precisions, mine, theirs, device, room):
    """Appends the distances of one draw; how many runs failed."""
    inputs, failed = case.inputs[draw], 0
    want = {k: v.double() for k, v in case.theirs(torch.float64, device, inputs).items()}
    norms = {k: float(v.norm()) for k, v in want.items()}
    grads = [v for k, v in norms.items() if k != "out"]
    floor = math.sqrt(sum(v * v for v in grads) / max(len(grads), 1))
    for p in precisions:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = p.name == "tf32"
        try:
            path = case.runs[draw, p].result()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"FAIL {case.name} {p.name}: {error}")
            failed += 1
            continue
        finally:
            room.release()
        theirs.setdefault(p, []).append(distances(case.theirs(p.dtype, device, inputs), want, norms, floor))
        mine.setdefault(p, []).append(distances(read(path), want, norms, floor))
        os.unlink(path)
    return failed


def run(a, work):
    device, began = torch.device(a.device if a.device == "cuda" else "cpu"), time.monotonic()
    precisions = CUDA if a.device == "cuda" else HOST
    make = {"dit": lambda r: trunk_cases("dit", a, work, r), "pixart": lambda r: trunk_cases("pixart", a, work, r),
            "sd3": lambda r: sd3_cases(a, work, r), "flux": lambda r: flux_cases(a, work, r),
            "latte": lambda r: clips_cases("latte", a, work, r), "ltx": lambda r: clips_cases("ltx", a, work, r),
            "sd2": lambda r: unet_cases("sd2", a, work, r), "sdxl": lambda r: unet_cases("sdxl", a, work, r),
            "vae": lambda r: vae_cases(a, work, r), "t5": lambda r: t5_cases(a, work, r),
            "clip": lambda r: clip_cases(a, work, r)}
    cases, passed, failed = [], 0, 0
    pool = concurrent.futures.ThreadPoolExecutor(a.jobs)
    room = threading.Semaphore(2 * a.jobs)  # results that wait to be compared: some GB each
    turns = Turns()

    def ours_when_room(*arguments):
        room.acquire()
        with turns.ours():
            return ours(*arguments)

    try:
        for number, kind in enumerate(a.only):
            made = make[kind](Random(device, number))
            for case in made:
                for draw, inputs in enumerate(case.inputs):
                    at = f"{len(cases)}-{draw}"
                    write(f"{work}/{at}.in.safetensors", inputs)
                    case.runs.update({(draw, p): pool.submit(ours_when_room, a, work, case, at, p)
                                      for p in precisions if draw == 0 or p.name == "bf16" or case.deep and p.hard})
                cases.append(case)
        for i, case in enumerate(cases):
            good, bad = check(case, device, room, turns)
            passed, failed = passed + good, failed + bad
            cases[i] = case = None  # its weights may go
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        room.release(1 << 16)  # nobody waits any longer
        pool.shutdown(cancel_futures=True)
    print(f"PyTorch {torch.__version__} on {device}, {time.monotonic() - began:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return failed == 0 and passed > 0


def main():
    kinds = ["dit", "pixart", "sd3", "flux", "latte", "ltx", "sd2", "sdxl", "vae", "t5", "clip"]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bundle")
    p.add_argument("--device", default="cuda", choices=["cuda", "host"])
    p.add_argument("--only", default=",".join(kinds))
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--t5-layers", type=int, default=4)
    p.add_argument("--draws", type=int, default=8, help="inputs of PixArt in bf16; SDXL gets half as many")
    p.add_argument("--jobs", type=int, default=3, help="of our programs at once")
    p.add_argument("--work", help="keep the files there; default: a temporary folder, in memory if it fits")
    a = p.parse_args()
    a.bundle, a.only = os.path.abspath(a.bundle), a.only.split(",")
    if set(a.only) - set(kinds):
        p.error(f"--only: {', '.join(kinds)}")
    shm = "/dev/shm"
    memory = os.path.isdir(shm) and shutil.disk_usage(shm).free > (1 if a.tiny else 32) << 30
    work = os.path.abspath(a.work) if a.work else tempfile.mkdtemp(prefix="lgt.", dir=shm if memory else None)
    os.makedirs(work, exist_ok=True)
    try:
        well = run(a, work)
    finally:
        if not a.work:
            shutil.rmtree(work)
    sys.exit(0 if well else 1)


main()
