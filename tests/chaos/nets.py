#!/usr/bin/env python3
"""Random pipelines: every net, with settings drawn at random, is run twice. What the second run has otherwise decides no bit
(docs/config.md: keys without "bits"): instances, windows, memos, how the state is cut and where it lies, what is recomputed,
offloaded, gathered; besides, its processes are killed, it is told to scale and to swap, and is stopped and started again at random
moments. Weights, average, optimizer state, metrics and ledger must be those of the first run.

usage: nets.py --build DIR --home DIR [--seed N] [--runs N] [--only NET,..] [--jobs N] [--gpus N | --stand-in]

HOME gets models and data (made once), the runs at work, and runs/bad.SEED.a and .b of what differed. Run N has seed SEED + N alone
for its settings; when something is killed depends on the machine. With --gpus N everything computes on N GPUs (DIR: a bundle), in any
precision, with ranks and encoders on GPUs drawn for each run; half of the nets with attention then have heads of 64 and sequences long
enough for the kernels that published models use. --stand-in does so with the two GPUs of tests/stub, which compute on the host, in memory
that nobody may take for the host's, and as late as they may; they reach each other or not. Settings that do not go together are refused by lgsup with a reason (exit status 3),
and counted. --jobs pipelines are tried side by side. Exit 1: a run differed, hung, or ended in another way. Python's own library is
enough.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

NETS = ("dit", "pixart", "sd3", "flux", "sd2", "sdxl", "latte", "ltx")
RUN_LIMIT_S = 120
STAND_IN = {}  # of --stand-in: what its programs find in their environment
# What `wide` writes into a tiny transformer's config.json: heads of 64, and positions for wide pictures.
WIDE = {
    "dit": {"num_attention_heads": 3, "attention_head_dim": 64, "sample_size": 32},
    "pixart": {"num_attention_heads": 3, "attention_head_dim": 64, "cross_attention_dim": 192, "sample_size": 48},
    "sd3": {"num_attention_heads": 3, "attention_head_dim": 64, "caption_projection_dim": 192, "pos_embed_max_size": 32},
    "flux": {"num_attention_heads": 3, "attention_head_dim": 64, "axes_dims_rope": [8, 28, 28]},
    "latte": {"num_attention_heads": 3, "attention_head_dim": 64, "cross_attention_dim": 192, "sample_size": 48},
    "ltx": {"num_attention_heads": 4, "attention_head_dim": 64, "cross_attention_dim": 256},
}
REFUSED, PARKED = 3, 11


# ---- models and data ----

def make(build, home, gpus):
    """lg-random-model NAME ARGUMENTS: each appears whole or not at all."""
    program = build / "bin" / "lg-random-model"
    pieces = "examples/emoji/text_encoder/spiece.model"
    spiece = next(path for path in (build / pieces, pathlib.Path(__file__).parents[2] / pieces) if path.exists())
    film = ["--format", "webp"] if gpus > 0 else []  # a bundle need not read films

    def one(name, *arguments):
        there, new = home / name, home / (name + ".new")
        if not there.exists():
            shutil.rmtree(new, ignore_errors=True)
            subprocess.run([program, *arguments, str(new)], check=True, stdout=subprocess.DEVNULL)
            new.rename(there)

    for net in NETS:
        one(net, "pipeline", "--preset", "tiny-" + net, "--dtype", "f32", "--seed", "3", "--spiece", str(spiece))
    one("pictures", "pictures", "--count", "60", "--size", "48", "--ratio", "3", "--classes", "5", "--per-shard", "25")
    one("clips", "clips", "--count", "30", "--size", "40", "--frames", "17", "--classes", "5", "--per-shard", "11", *film)
    one("wide-pictures", "pictures", "--count", "60", "--size", "400", "--ratio", "3", "--classes", "5", "--per-shard", "25")
    one("wide-clips", "clips", "--count", "30", "--size", "200", "--frames", "17", "--classes", "5", "--per-shard", "11", *film)
    for net in WIDE:
        wide(home / net, home / ("wide-" + net))
    one("more", "clips", "--count", "10", "--size", "40", "--frames", "17", "--classes", "5", "--format", "webp", "--seed", "5")
    spoil(home / "pictures", home / "spoiled")


def wide(tiny, folder):
    """The pipeline with a transformer of WIDE, which has no weights: for model.fresh."""
    if folder.exists():
        return
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(tiny, new)
    for weights in (new / "transformer").glob("*.safetensors"):
        weights.unlink()
    path = new / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **WIDE[tiny.name]}))
    new.rename(folder)


def spoil(shards, folder):
    """The pictures as files, a third of them cut off, overwritten or empty, some without a caption."""
    if folder.exists():
        return
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for tar in sorted(shards.glob("*.tar")):
        subprocess.run(["tar", "xf", str(tar), "-C", str(new)], check=True)
    for i, picture in enumerate(sorted(new.glob("*.jpg"))):
        if i % 9 == 2:
            os.truncate(picture, picture.stat().st_size // 2)
        elif i % 9 == 5:
            picture.write_bytes(bytes(300))
        elif i % 9 == 8:
            picture.write_bytes(b"")
    for caption in sorted(new.glob("*.txt"))[:2]:
        caption.unlink()
    new.rename(folder)


# ---- settings ----

class Draw:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def of(self, *choices):
        return self.random.choice(choices)

    def chance(self, p):
        return self.random.random() < p


def draw_data(d, net, home, s):
    """Sets where samples come from, and their shapes; returns the frames of one."""
    frames = 1
    if net in ("latte", "ltx") and d.chance(0.85):
        frames = d.of(9, 17) if net == "ltx" else d.of(2, 4, 5, 8)
        s["data.frames"] = frames
        s["data.path"] = ",".join(str(home / name) for name in ("clips", d.of("more", "pictures"))[: d.of(1, 2)])
        # All clips have 17 frames, 25 a second: so many can be had, and a run needs some that are long enough.
        if d.chance(0.3):
            s["data.stride"] = 2 if frames <= 9 else 1
        elif d.chance(0.3):
            s["data.fps"] = d.of(*[fps for fps, most in ((8, 6), (12.5, 9), (25, 17)) if frames <= most])
    elif d.chance(0.2):
        both = [{"path": str(home / "pictures")}, {"path": str(home / "spoiled")}]
        if d.chance(0.5):
            both[0]["weight"], both[1]["weight"] = 3, 2
        else:
            both[0]["repeats"] = 2
        s["data.source"] = both
    else:
        s["data.path"] = str(home / d.of("pictures", "pictures", "spoiled"))
    s["data.void_ratio_max"] = 1
    if net == "dit":
        s["data.size"] = d.of(16, 32)
    else:
        s["data.size"] = d.of(16, 32, 48) if d.chance(0.6) else [d.of(16, 32, 48), d.of(16, 32, 48)]
        if d.chance(0.3):
            s["data.buckets"] = d.of("ratio", ["16x16", "16x32", "32x16"], ["32x32", "48x16"])
            if frames > 1 and d.chance(0.6):
                s["data.buckets"] = [f"{frames}x16x16", "1x32x32", f"{frames}x16x32"]
        if d.chance(0.2):
            s["data.caption"] = d.of("first", "random")
        if d.chance(0.15):
            s["text.dropout"] = 0.3
    for key, value, p in (("crop", "random", 0.2), ("flip", True, 0.3), ("shuffle", False, 0.1)):
        if d.chance(p):
            s["data." + key] = value
    return frames


def draw_wide_data(d, net, home, s):
    """The same, of pictures and clips that are 256 tokens and more."""
    clips = net in ("latte", "ltx")
    frames = d.of(9, 17) if net == "ltx" else d.of(2, 4) if clips else 1
    s["data.path"] = str(home / ("wide-clips" if clips else "wide-pictures"))
    s["data.void_ratio_max"] = 1
    if clips:
        s["data.frames"] = frames
    s["data.size"] = 256 if net == "dit" else d.of(256, [256, 320], 384) if net != "ltx" else d.of(96, [128, 96], 192)
    if net in ("sd3", "flux", "ltx") and d.chance(0.3):
        s["data.buckets"] = ["128x96", "64x96"] if net == "ltx" else ["256x256", "256x320", "384x192"]
    return frames


def draw_sizes(d, net, frames, s):
    """Ranks, batches and chunks that go together; returns the micro-batches of a rank."""
    ranks = d.of(1, 1, 2, 2, 2, 3, 4)
    sp = d.of(*[n for n in (1, 1, 1, 2, 3, 4) if ranks % n == 0]) if net not in ("sd2", "sdxl") else 1
    micro, micros = d.of(1, 2, 3, 4), d.of(1, 1, 2, 3)
    batch = micro * micros * ranks // sp
    chunks = [n for n in range(1, 9) if (micro if "data.buckets" in s else 2 * batch) % n == 0]
    s.update({"trainer.ranks": ranks, "parallel.sp": sp, "trainer.micro_batch_size": micro, "trainer.global_batch_size": batch})
    if sp > 1 and net != "ltx" and d.chance(0.4):
        s["parallel.sp_kind"] = "fastseq"
    for role in ("loader", "text", "vae"):
        s[role + ".chunk"] = d.of(*chunks)
    if d.chance(0.25):
        s["vae.slice"] = d.of("auto", 8) if frames > 1 and net == "ltx" else d.of("auto", 1)
    return micros


def draw_training(d, net, frames, s):
    if "model.fresh" not in s and d.chance(0.25):
        s.update({"adapter.kind": "lora", "adapter.rank": d.of(1, 4, 7, 16), "adapter.targets": d.of("attention", "linear")})
        if d.chance(0.3):
            s["model.frozen"] = d.of("fp8", "int8")
    elif d.chance(0.2):
        s["model.fresh"] = True
    elif d.chance(0.25):
        s["trainer.groups"] = d.of(["*.bias lr=0.1 decay=0"], ["*blocks.0.* frozen", "*.bias lr=2"], ["*.ff.* optimizer=adamw8bit"])
    for key, value, p in (("trainer.optimizer", "adamw8bit", 0.3), ("trainer.clip_norm", d.of(0.1, 1.0), 0.2), ("trainer.warmup_steps", 3, 0.2),
                          ("trainer.lr_schedule", d.of("cosine", "linear"), 0.2), ("trainer.weight_decay", 0.1, 0.2), ("trainer.threads", 2, 0.15),
                          ("trainer.cond_dropout", d.of(0, 0.5, 1), 0.3), ("trainer.timesteps", d.of("uniform", "mode"), 0.15),
                          ("text.length", d.of(4, 9, 16), 0.3), ("text.storage", d.of("fp8", "int8"), 0.15), ("vae.threads", 2, 0.1)):
        if d.chance(p):
            s[key] = value
    if d.chance(0.25):
        s["memory.mlp_chunks"] = d.of(2, 3, 7)
    if net == "ltx" and frames > 1 and d.chance(0.2):
        s["trainer.clean_first_frame"] = 0.3
    s.update({"trainer.lr": d.of(1e-4, 1e-3, 5e-3), "trainer.max_steps": d.of(7, 11, 16), "ema.decay": d.of(0.9, 0.999)})


def draw_settings(d, home, net, gpus):
    """What decides bits; and which values of parallel.zero give the same ones."""
    s = {"pipeline": str(home / net), "job.name": "net", "job.seed": d.random.randrange(1000), "sample.captions": [],
         "supervisor.restarts_max": 1000}
    is_wide = gpus > 0 and not STAND_IN and net in WIDE and d.chance(0.5)
    if is_wide:
        s["pipeline"], s["model.fresh"] = str(home / ("wide-" + net)), True
    frames = draw_wide_data(d, net, home, s) if is_wide else draw_data(d, net, home, s)
    micros = draw_sizes(d, net, frames, s)
    draw_training(d, net, frames, s)
    if gpus > 0:
        s["device"], s["precision"] = "cuda", "fp32" if STAND_IN else d.of("bf16", "bf16", "fp16", "tf32", "fp32")
        if d.chance(0.25):
            s["memory.offload_optimizer"] = True  # the host rounds otherwise than a GPU
    return s, (0, 1, 2, 3) if micros == 1 else d.of((0, 1), (2, 3))


def draw_free(d, s, zeros, gpus):
    """What decides none."""
    f = {role + ".instances": d.of(1, 1, 2, 3) for role in ("loader", "text", "vae")}
    batch, ranks = s["trainer.global_batch_size"], s["trainer.ranks"]
    need = 2 * batch + max(f[role + ".instances"] * s[role + ".chunk"] for role in ("loader", "text", "vae"))
    f["window.batches"] = d.of(*[n for n in (2, 4, 6, 8, 12, 24, 48) if n * batch >= need][:3])
    f["parallel.zero"] = d.of(*zeros)
    if f["parallel.zero"] == 3 and d.chance(0.4):
        f["parallel.reshard"] = False
    if f["parallel.zero"] and d.chance(0.3):
        f["parallel.group"] = d.of(*[n for n in (1, 2, 3, 4) if ranks % n == 0])
    if d.chance(0.4):
        f["memory.recompute"] = d.of("norms", "mlp", "block", [0], "every:2", "ratio:0.5", "uniform:1", "uniform:2")
    for key, p in (("offload_activations", 0.3), ("offload_optimizer", 0.25), ("offload_ema", 0.2), ("cast_weights", 0.25)):
        if d.chance(p) and not (key == "cast_weights" and "memory.offload_optimizer" in {**s, **f}) and not (key == "offload_optimizer" and gpus > 0):
            f["memory." + key] = True
    f.update({"text.memo": d.of("auto", "0", "64KiB"), "vae.memo": d.of("auto", "0", "64KiB"), "turns": d.of("auto", "always", "never"),
              "parallel.exchange": d.of("auto", "auto", "host"), "checkpoint.every": d.of(0, 1, 2, 3, 5), "checkpoint.keep": d.of(1, 2, 30)})
    for role in ("trainer", "text", "vae") if gpus > 0 else ():
        f[role + ".gpus"] = ",".join(map(str, d.random.sample(range(gpus), d.random.randint(1, gpus))))
    if STAND_IN:  # not of the config
        f.update(STAND_IN, LG_STUB=d.of("two", "two", "apart"), LG_STUB_LATE=d.of("", "1"))
    return f


# ---- runs ----

def toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


class Run:
    def __init__(self, build, home, name):
        self.bin, self.dir, self.file = build / "bin", home / "runs" / name, home / "runs" / (name + ".toml")
        self.out, self.killed, self.obeyed = home / "runs" / (name + ".out"), 0, 0
        self.env = {"LG_CUDA_CACHE": str(home / "algorithms.txt"), **os.environ, "XDG_RUNTIME_DIR": str(home / "runtime")}
        self.remove()

    def remove(self):
        for path in (self.file, self.out):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.dir, ignore_errors=True)

    def write(self, settings):
        sections = {}
        for key, value in {**settings, "job.dir": str(self.dir)}.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(f"{name} = {toml(value)}")
        self.file.write_text("\n".join(sections.pop("", [])) + "\n" + "".join(
            f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items()))

    def processes(self):
        """Pids of its roles."""
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    words = pathlib.Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if str(self.dir).encode() in words and words[0].startswith(str(self.bin / "lg-").encode()):
                    yield int(entry)

    def kill_one(self, d):
        there = list(self.processes())
        if there:
            try:
                os.kill(d.of(*there), signal.SIGKILL)
                self.killed += 1
            except ProcessLookupError:
                pass

    def order(self, d):
        """Another number of encoders or loaders, or a process for another one. It may be refused, as when the run has ended."""
        role = d.of("loader", "text", "vae")
        words = ["scale", role, str(d.of(1, 2, 3))] if d.chance(0.6) else ["swap", d.of(role, "ema", "ckpt", "trainer")]
        self.orders.append(subprocess.Popen([self.bin / "lgsup", *words, self.dir], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL, env=self.env))

    def go(self, d, settings, kills=0, stop_after=None, orders=0):
        """lgsup's exit status; None: it hung. It is stopped after so many seconds."""
        self.write({key: value for key, value in settings.items() if not key.startswith("LG_")})
        self.env.pop("LG_STUB_LATE", None)
        self.env.update({key: value for key, value in settings.items() if key.startswith("LG_") and value})
        began, kills, again, ordered = time.monotonic(), self.killed + kills, 0, d.random.uniform(0.2, 1)
        self.orders = []
        with open(self.out, "a") as out:
            lgsup = subprocess.Popen([self.bin / "lgsup", "start", self.file], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.env)
        while lgsup.poll() is None:
            now = time.monotonic() - began
            if now > RUN_LIMIT_S:
                for pid in self.processes():
                    os.kill(pid, signal.SIGKILL)
                lgsup.kill()
                lgsup.wait()
                for order in self.orders:
                    order.kill()
                return None
            if stop_after is not None and now > stop_after:
                self.orders.append(subprocess.Popen([self.bin / "lgsup", "stop", self.dir], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                    stderr=subprocess.DEVNULL, env=self.env))
                stop_after = None
            if self.killed < kills and now > again:
                self.kill_one(d)
                again = now + d.random.expovariate(4)
            if len(self.orders) < orders and now > ordered:
                self.order(d)
                ordered = now + d.random.expovariate(3)
            time.sleep(0.01)
        self.obeyed += sum(order.wait(RUN_LIMIT_S) == 0 for order in self.orders)
        return lgsup.returncode

    def says(self):
        return " | ".join(line.strip()[:300] for line in self.out.read_text(errors="replace").strip().split("\n")[-2:])

    def result(self):
        """What must not depend on how it was run."""
        steps = [path for path in (self.dir / "checkpoints").glob("net_step*") if path.name[8:].isdigit()]
        last = max(steps, key=lambda path: int(path.name[8:]))
        found = {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}
        metrics = [json.loads(line) for line in open(self.dir / "metrics.jsonl")]
        found["metrics"] = [(m["step"], m["loss"], m["grad_norm"], m["voids"]) for m in metrics]
        found["ledger"] = (self.dir / "ledger").read_bytes()
        found["last step"] = last.name
        return found

    def keep(self, name):
        to = self.dir.parent / name
        shutil.rmtree(to, ignore_errors=True)
        if self.dir.exists():
            shutil.copytree(self.dir, to, ignore=shutil.ignore_patterns("regions", "runtime", "board"))
            for path in (self.file, self.out):
                shutil.copy(path, to)


def try_one(seed, build, home, only, gpus):
    """What came of it, in a word, and what to print."""
    d, chances = Draw(seed), Draw(-1 - seed)  # what is killed when takes as many draws as there is time for: not of d
    settings, zeros = draw_settings(d, home, d.of(*only), gpus)
    whole, *parts = ({**settings, **draw_free(d, settings, zeros, gpus)} for _ in range(2 + d.of(0, 1, 1, 2)))
    first, second = Run(build, home, f"{seed}.a"), Run(build, home, f"{seed}.b")
    code = first.go(chances, whole)
    if code != 0:
        return ("refused" if code == REFUSED else "parked" if code == PARKED else "bad"), first, second, first.says()
    for part in parts[:-1]:
        code = second.go(chances, part, chances.of(0, 0, 1), chances.random.uniform(0.2, 1.2))
        if code == REFUSED:
            return "refused", first, second, second.says()
    code = second.go(chances, parts[-1], chances.of(0, 1, 2, 4), orders=chances.of(0, 0, 1, 3))
    if code != 0:
        return ("refused" if code == REFUSED else "bad"), first, second, second.says()
    a, b = first.result(), second.result()
    differ = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    return ("bad" if differ else "same"), first, second, "differs: " + ", ".join(differ)


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    words.add_argument("--build", type=pathlib.Path, required=True)
    words.add_argument("--home", type=pathlib.Path, required=True)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--runs", type=int, default=100)
    words.add_argument("--only", default=",".join(NETS))
    words.add_argument("--jobs", type=int, default=1)
    words.add_argument("--gpus", type=int, default=0)
    words.add_argument("--stand-in", action="store_true")
    words = words.parse_args()
    only = words.only.split(",")
    if not set(only) <= set(NETS):
        raise SystemExit(f"--only: of {', '.join(NETS)}")
    build, home = words.build.resolve(), words.home.resolve()
    (home / "runs").mkdir(parents=True, exist_ok=True)
    if words.stand_in:
        words.gpus, backends = 2, home / "backends"
        backends.mkdir(exist_ok=True)
        for backend in (build / "tests/stub/liblg-cuda.so", build / "lib/liblg-host.so"):
            (backends / backend.name).unlink(missing_ok=True)
            (backends / backend.name).symlink_to(backend)
        STAND_IN.update(LG_BACKEND_DIR=str(backends), LG_STUB_MEMORY="1", LG_STUB_HOST=str(build / "lib/liblg-host.so"))
    (home / "runtime").mkdir(mode=0o700, exist_ok=True)
    make(build, home, words.gpus)
    count, kills, orders = {}, 0, 0
    with concurrent.futures.ThreadPoolExecutor(words.jobs) as pool:
        seeds = range(words.seed, words.seed + words.runs)
        for seed, (word, first, second, says) in zip(seeds, pool.map(lambda seed: try_one(seed, build, home, only, words.gpus), seeds)):
            count[word] = count.get(word, 0) + 1
            kills += second.killed
            orders += second.obeyed
            if word != "same":
                print(f"{seed} {word}: {says}", flush=True)
            for run, letter in ((first, "a"), (second, "b")):
                if word in ("bad", "parked"):
                    run.keep(f"bad.{seed}.{letter}")
                run.remove()
    print(", ".join(f"{n} {word}" for word, n in sorted(count.items())) + f"; {kills} killed, {orders} orders obeyed")
    raise SystemExit(1 if count.get("bad") or count.get("parked") or not count.get("same") else 0)


main()
