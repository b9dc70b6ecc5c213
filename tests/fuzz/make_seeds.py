"""First seeds of the fuzz targets: small, well-formed inputs that reach every branch worth reaching.

usage: python3 tests/fuzz/make_seeds.py        (standard library alone)

Writes tests/fuzz/corpus/<target>/<name>; files with other names, found by fuzzing, stay.
"""
import base64
import io
import json
import os
import struct
import tarfile
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def put(target, name, data):
    folder = os.path.join(HERE, "corpus", target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data.encode() if isinstance(data, str) else data)


def read(path):
    with open(os.path.join(ROOT, path), "rb") as f:
        return f.read()


# ---- TOML and configs ----

TOML = '''a = 1
b = [ "x", "y", ] # list
c.d."e.f" = 1.5e3
"quoted \\u00e9" = 'raw'
t = { u = true, v = { w = false } }
m = """
many
lines"""
n = [1, [2, "three"], {}]
day = 1979-05-27T07:32:00Z
hex = 0xFF
inf = -inf

[s]
k = "v"
[s.t]
l = []
[[array]]
x = 1
[[array]]
y = nan
'''
put("toml", "all", TOML)
put("toml", "value-list", '["a", "b"]')
put("toml", "value-text", '"a \\" b"')
put("toml", "value-number", "2e-3")
put("toml", "two-values", '1\nother = 2')
put("toml", "error", "a = [1,\n")
put("toml", "bom", b"\xef\xbb\xbfa = 1\r\n")
put("toml", "header-without-key", "[:x]\n")
put("toml", "bare-key-not-ascii", "a = 1\n\u00e9 = 2\n")
put("toml", "deep", "[" + "a." * 1000 + "a]\n")
put("toml", "headers", "[a.b.c.d]\n[a.b.c.d.e.f]\ng.h.i = {j.k = 1}\n")

LATENTS = '''[job]
name = "x"
dir = "/nonexistent/run"
[data]
path = "/dev/null,/dev/zero"
latent_size = 8
[model]
kind = "dit"
num_classes = 10
hidden = 32
heads = 2
[trainer]
global_batch_size = 8
micro_batch_size = 4
max_steps = 100
objective = "eps"
min_snr_gamma = 5.0
[sample]
captions = ["1", "2"]
'''
put("config", "emoji", read("examples/emoji/pipeline.toml"))
put("config", "latents", LATENTS)
put("config", "overrides", LATENTS.encode() + b"\0trainer.max_steps=80\0job.name=word\0sample.captions=one"
    b"\0sample.captions=[\"a\", \"b\"]\0data.flip=true\0trainer.lr=1e-4\0data.path='rel,{a,b}'")
put("config", "wrong", LATENTS.replace("100", "-1").replace('"eps"', '"epsilon"') + "\0trainer.max_step=80\0=\0x")
put("config", "litegen", "exp_name = 1\n[encoder]\nx = 1\n[trainr]\ny = 2\n[trainer.z]\na = 1\n")
put("config", "escapes", '[job]\nname = "a\\"b\\\\c\\td\\u0007\\u007f\\u00e9"\ndir = ""\n')

# ---- JSON of models, manifests, plans ----

for name, path in (("vae", "examples/emoji/vae/config.json"), ("t5", "examples/emoji/text_encoder/config.json")):
    put("model_config", name, json.dumps(json.loads(read(path))))
put("model_config", "vae-too-many-blocks", json.dumps({"_class_name": "AutoencoderKL", "block_out_channels": [32] * 3000}))
put("model_config", "t5-v1.0", json.dumps({"model_type": "t5", "vocab_size": 100, "d_model": 8, "d_kv": 4, "d_ff": 16,
    "num_heads": 2, "num_layers": 2, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu"}))
for name, more in (("clip", {}), ("clip-projection", {"architectures": ["CLIPTextModelWithProjection"], "projection_dim": 6,
                   "hidden_act": "gelu", "eos_token_id": 2})):
    put("model_config", name, json.dumps({"model_type": "clip_text_model", "vocab_size": 99, "hidden_size": 12,
        "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 9, **more}))
put("model_config", "dit", json.dumps({"_class_name": "DiTTransformer2DModel", "num_attention_heads": 4,
    "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "patch_size": 2, "sample_size": 16,
    "activation_fn": "gelu-approximate", "attention_bias": True, "norm_elementwise_affine": False, "norm_eps": 1e-5,
    "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10}))
put("model_config", "pixart", json.dumps({"_class_name": "PixArtTransformer2DModel", "num_attention_heads": 4,
    "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "patch_size": 2, "sample_size": 16,
    "_sample_width": 24, "cross_attention_dim": 32, "caption_channels": 16, "_text_length": 7,
    "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "interpolation_scale": None,
    "use_additional_conditions": False, "attention_type": "default"}))

MANIFEST = {"format": 1, "name": "emoji", "step": 500, "next_n": 8000, "seed": 0, "plan_hash": "0123456789abcdef",
            "isa": "avx2", "ranks": 2, "threads": 1, "fingerprint": "host isa=avx2", "optimizer_steps": 500, "skipped": 0,
            "files": [{"path": "a", "bytes": 1, "xxh3": "0123456789abcdef"}, {"path": "b", "bytes": 0, "xxh3": "2d06800538d394c2"}]}
put("manifest", "good", json.dumps(MANIFEST))
put("manifest", "missing-file", json.dumps({**MANIFEST, "files": [{"path": "c/d", "bytes": 1, "xxh3": "0" * 16}]}))
put("manifest", "escape", json.dumps({**MANIFEST, "files": [{"path": "../a", "bytes": 1, "xxh3": "0" * 16}]}))
put("manifest", "huge-ranks", json.dumps({**MANIFEST, "ranks": 8589934592}))
put("manifest", "long-name", json.dumps({**MANIFEST, "name": "n" * 5000}))
put("manifest", "long-path", json.dumps({**MANIFEST, "files": [{"path": "p" * 5000, "bytes": 1, "xxh3": "0" * 16}]}))
put("manifest", "many-files", json.dumps({**MANIFEST, "files": MANIFEST["files"] * 40}))
put("manifest", "format", '{"format": 2}')

ROLES = ("loader", "text", "vae", "trainer", "ema", "ckpt", "keeper", "lgsup")
PLAN = {"format": 2, "image_size": 64, "latent_channels": 4, "latent_size": 16, "scaling_factor": 0.75124, "shift_factor": 0,
        "text_length": 24, "text_dim": 192, "num_classes": 0, "batch": 16, "rank_batch": 8, "micro_batch": 8,
        "window_slots": 64, "loader_chunk": 8, "text_chunk": 8, "vae_chunk": 8, "instances": {r: 1 for r in ROLES},
        "text_shards": 2, "threads": {r: 1 for r in ROLES}, "isa": "avx512", "precision": "fp32",
        "element_bytes": 4, "lr_steps": 1500,
        "bits_hash": "48107de4c2b61d3e", "hash": "6e375fd348e93772", "seal": "0ebf1b8c780cddb0"}
put("plan", "sealed", json.dumps({**PLAN, "instances": {**PLAN["instances"], "text": 2, "vae": 2, "trainer": 2}}))
put("plan", "broken-seal", json.dumps(PLAN))
put("plan", "long-isa", json.dumps({**PLAN, "isa": "a" * 3000}))
put("plan", "roles-no-table", json.dumps({**PLAN, "instances": [1, 2]}))

put("json", "all", '{"a": [1, -2.5e-3, true, false, null, "x\\n\\u00e9\\ud83d\\ude00"], "": {"b": {}, "c": []}}')
put("json", "text", '"caf\u00e9 \\"quoted\\" \\\\ \\/"')
put("json", "deep", "[" * 64 + "]" * 64)
put("json", "twice", '{"a": 1, "\\u0061": 2}')
put("json", "bom", b"\xef\xbb\xbf[0]\r\n")
put("json", "long-number", "[" + "1" * 100 + "]")

# ---- safetensors ----


def safetensors(header, data, pad=b""):
    h = json.dumps(header).encode() + pad
    return struct.pack("<Q", len(h)) + h + data


TYPES = (("F32", 4), ("F64", 8), ("F16", 2), ("BF16", 2), ("I32", 4), ("I64", 8), ("U8", 1))
header, at = {"__metadata__": {"format": "pt"}}, 0
for i, (kind, width) in enumerate(TYPES):
    header["t%d" % i] = {"dtype": kind, "shape": [2, 3], "data_offsets": [at, at + 6 * width]}
    at += 6 * width
put("safetensors", "types", safetensors(header, bytes(range(at)), b"   "))
put("safetensors", "empty", safetensors({}, b""))
put("safetensors", "scalar-and-empty", safetensors({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    "b": {"dtype": "F16", "shape": [3, 0], "data_offsets": [4, 4]}}, b"\0\0\x80\x3f"))
put("safetensors", "hole", safetensors({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"xy"))
put("safetensors", "huge", safetensors({"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}, b"0000"))
put("safetensors", "length", struct.pack("<Q", 1 << 63) + b"{}")

put("weights", "good", '{"metadata": {"total_size": 8}, "weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}')
put("weights", "missing-tensor", '{"weight_map": {"x": "a.safetensors", "z": "a.safetensors"}}')
put("weights", "damaged-part", '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
put("weights", "escape", '{"weight_map": {"x": "../a.safetensors", "y": ".."}}')

# ---- tar ----


def tar(names, fmt, end=True):
    b = io.BytesIO()
    with tarfile.open(fileobj=b, mode="w", format=fmt) as t:
        for name, content in names:
            m = tarfile.TarInfo(name)
            m.size = len(content)
            t.addfile(m, io.BytesIO(content))
    data = b.getvalue().rstrip(b"\0")
    data += bytes(-len(data) % 512)
    return data + bytes(1024) if end else data


SMALL = [("0001.txt", b"a cat"), ("0001.cls", b"3"), ("sub/0002.json", b'{"caption": "a dog"}')]
LONG = [("x" * 90 + "/" + "y" * 60 + ".txt", b"long")]
put("tar", "ustar", tar(SMALL, tarfile.USTAR_FORMAT))
put("tar", "ustar-prefix", tar(LONG, tarfile.USTAR_FORMAT))
put("tar", "gnu-long", tar(LONG, tarfile.GNU_FORMAT))
put("tar", "pax-long", tar([("\u00e9" * 120, b"long")], tarfile.PAX_FORMAT))
put("tar", "joined", tar(SMALL[:1], tarfile.USTAR_FORMAT) + tar(SMALL[1:2], tarfile.USTAR_FORMAT))
put("tar", "no-end", tar(SMALL[:1], tarfile.USTAR_FORMAT, end=False))
put("tar", "cut", tar(SMALL[:1], tarfile.USTAR_FORMAT, end=False)[:515])

# ---- samples (format: tests/fuzz/captions.c) ----

JSON, TXT, CLS, PNG, JPEG, WEBP, JPG, LATENT = range(8)
NEW = 16


def members(options, *parts):
    return bytes([options]) + b"".join(bytes([kind]) + struct.pack("<H", len(c)) + c for kind, c in parts)


picture = {k: read("tests/golden/pictures/" + n) for k, n in ((PNG, "palette.png"), (JPEG, "grey.jpg"), (WEBP, "lossy.webp"))}
put("captions", "json-caption", members(1, (PNG, picture[PNG]), (JSON, b'{"caption": " a \\u00e9 cat\\n"}')))
put("captions", "json-captions", members(1, (JPEG, picture[JPEG]), (JSON, b'{"captions": ["one", "two", ""], "caption": "three"}')))
put("captions", "json-forms", members(0, (WEBP, picture[WEBP]), (JSON, b'["a", "b"]'), (NEW | PNG, picture[PNG]), (JSON, b'"c"'),
    (NEW | PNG, picture[PNG]), (JSON, b'{"caption": 3}'), (NEW | PNG, picture[PNG]), (JSON, b'{"caption": null}'), (TXT, b"t")))
put("captions", "too-many", members(1, (PNG, picture[PNG]), (JSON, json.dumps([str(i) for i in range(300)]).encode())))
put("captions", "labels", members(2, (PNG, picture[PNG]), (CLS, b" 7\n"), (NEW | PNG, picture[PNG]), (CLS, b"-1"), (NEW | PNG, picture[PNG]),
    (CLS, b"99999999999999999999"), (NEW | PNG, picture[PNG]), (CLS, b"")))
put("captions", "text", members(1, (PNG, picture[PNG]), (TXT, b"\xef\xbb\xbf a dog \r\n"), (NEW | PNG, picture[PNG]), (TXT, b" \0 ")))
mean = {"latent_mean": {"dtype": "F16", "shape": [2, 2, 2], "data_offsets": [0, 16]},
        "latent_logvar": {"dtype": "F16", "shape": [1, 2, 2, 2], "data_offsets": [16, 32]}}
put("captions", "latents", members(0, (LATENT, safetensors(mean, bytes(32))), (TXT, b"x"), (NEW | PNG, picture[PNG]), (NEW | LATENT, b"short")))

# ---- pictures that are not in tests/golden/pictures ----


def png(width, height, depth, color, interlace=0):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)) + chunk(
        b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


put("picture", "png-large-and-empty", png(8192, 8192, 16, 6, 1))
put("picture", "png-too-large", png(8193, 8192, 8, 2))
put("picture", "png-huge", png(0x7FFFFFFF, 0x7FFFFFFF, 8, 2))
put("picture", "png-palette-missing", png(10, 10, 8, 3))
put("picture", "jpeg-huge", read("tests/golden/pictures/progressive.jpg").replace(
    b"\xff\xc2\x00\x11\x08", b"\xff\xc2\x00\x11\x08\xff\xff\xff\xff", 1))

# ---- messages, requests, captions ----


def message(*v):
    out = bytes([0x90 | len(v)])
    for x in v:
        if isinstance(x, str):
            x = x.encode()
            out += (bytes([0xA0 | len(x)]) if len(x) < 32 else b"\xda" + struct.pack(">H", len(x))) + x
        else:
            out += bytes([x]) if x < 128 else b"\xce" + struct.pack(">I", x)
    return out


HELLO = message(1, 0, 2, 1, 4000000, 0, "")
EVENT = message(1, 2, 3, 0, 7, 200, "a line\x1b of text that is longer than a short string")
put("message", "hello", HELLO)
put("message", "event", EVENT)
put("message", "long", message(1, 5, 7, 0, 1, 0, "x" * 400))
put("message", "text-over-limit", message(1, 5, 7, 0, 1, 0, "x" * 450))
put("message", "short-array", message(1, 0, 2))
put("message", "other-version", message(2, 0, 2, 1, 4, 0, ""))


def parts(*p):
    return b"".join(struct.pack("<H", len(x)) + x for x in p)


put("control", "one", parts(HELLO))
put("control", "empty", parts(b""))
put("control", "two-parts", parts(b"", EVENT))
put("control", "many", parts(HELLO, HELLO, b"", EVENT))
put("control", "too-long", parts(bytes(600)))
put("control", "hang-up", parts(HELLO, bytes(1050)))


def request(op, name, what=0, k=0, size=88):
    n = name if isinstance(name, bytes) else name.encode()
    return struct.pack("<BBHHB", what, op, k & 65535, size, len(n)) + n


PUT, GET, LIST, DROP = 1, 2, 3, 4
put("keeper", "life", request(PUT, "a", 1) + request(PUT, "a", 1) + request(GET, "a") + request(LIST, "") + request(LIST, "", k=1)
    + request(DROP, "a") + request(GET, "a") + request(DROP, ""))
put("keeper", "odd", request(PUT, "b") + request(PUT, "c", 3) + request(GET, "c", 1) + request(LIST, "", k=-1) + request(9, "x", 1)
    + request(PUT, "", 1) + request(PUT, b"n" * 64, 1) + request(GET, "c", 4))
put("keeper", "raw", request(PUT, b"z" * 100, 8, size=10) + request(PUT, b"z" * 200, 8 | 2, size=200) + request(PUT, "d", 1 | 32) + request(PUT, "e", 16 | 2))

for name, text in (("words", b"\x18grinning face"), ("utf8", "\x10caf\u00e9 \u732b \U0001f600 \u200b".encode()), ("invalid", b"\x08\xff\xfe\xc3("),
                   ("one", b"\x00much too long for one token"), ("spaces", b"\x20 \t\n  \xe3\x80\x80 "), ("pieces", b"\x20<pad></s><unk>\xe2\x96\x81")):
    put("tokenizer", name, text)

# ---- tokenizer models, and their character tables ----


def varint(v):
    return bytes([v]) if v < 128 else bytes([v & 127 | 128]) + varint(v >> 7)


def field(number, v):
    if isinstance(v, int):
        return varint(number << 3) + varint(v % (1 << 64))
    return varint(number << 3 | 2) + varint(len(v)) + v


def piece(text, kind, score=-1.0):
    return field(1, field(1, text) + varint(2 << 3 | 5) + struct.pack("<f", score) + field(3, kind))


def charsmap(texts=b"\0a\0xy\0"):
    """Keys "A" (at 1: "a") and "AB" (at 3: "xy"); states 1, 4 and 8."""
    units = [0] * 256
    units[0] = 1 << 10
    units[1 ^ 65] = (1 ^ 65 ^ 4) << 10 | 1 << 8 | 65
    units[4] = 1 << 31 | 1
    units[4 ^ 66] = (4 ^ 66 ^ 8) << 10 | 1 << 8 | 66
    units[8] = 1 << 31 | 3
    return struct.pack("<257I", 1024, *units) + texts


PIECES = piece(b"<pad>", 3) + piece(b"</s>", 3) + piece(b"<unk>", 2) + piece(b"a", 1) + piece("\u2581red".encode(), 1) + piece(b"x", 4)
TRAINER = field(3, 1) + field(40, 2) + field(41, -1) + field(42, 1) + field(43, 0)
put("spiece", "table", charsmap())
put("spiece", "table-no-end", charsmap(b"\0a\0xy"))
put("spiece", "model", PIECES + field(2, TRAINER) + field(3, field(1, b"nmt_nfkc") + field(3, 1)))
put("spiece", "model-with-table", PIECES + field(2, TRAINER) + field(3, field(2, charsmap()) + field(5, 0)) + field(5, field(2, charsmap())))
put("spiece", "model-self-test", PIECES + field(2, TRAINER) + field(4, field(1, field(1, b"a x") + field(2, b"a x"))))
put("spiece", "model-bytes", PIECES + b"".join(piece(b"<0x%02X>" % i, 6) for i in range(256)) + field(2, TRAINER + field(35, 1)))
put("spiece", "model-bpe", PIECES + field(2, TRAINER + field(3, 2)))


def spiece_json(name, vocab, more=""):
    put("spiece", "json-" + name, ('{"model": {"type": "Unigram", "vocab": [["<pad>", 0], ["</s>", 0], ["<unk>", 0]%s]}%s}' % (vocab, more)).encode())


spiece_json("small", ', ["a", -1.5], ["\\u2581A", -2e0]', ', "pre_tokenizer": {"type": "Metaspace"}')
spiece_json("table", ', ["a", 0]', ', "normalizer": {"type": "Precompiled", "precompiled_charsmap": "%s"}' % base64.b64encode(charsmap()).decode())
spiece_json("added", ', ["a", 0], ["<extra_id_0>", 0]', ', "added_tokens": [{"content": "<extra_id_0>"}]')

# ---- BPE: vocabulary (empty: a whole one), merges, special tokens, a caption ----

def bpe(name, vocab, merges, config, caption):
    put("bpe", name, b"\0".join(x.encode() for x in (vocab, merges, config, caption)))


bpe("small", "", "#version: 0.2\na b\na b</w>\n", "", "Ab ABAB \u00c5ngstr\u00f6m caf\u0065\u0301 it's 12 <|endoftext|> \u0130")
bpe("pad", "", "", '{"pad_token": "!", "bos_token": {"content": "<|startoftext|>", "normalized": true}}', "a!! <|STARTOFTEXT|>")
bpe("added", "", "b a\r\n", '{"added_tokens_decoder": {"0": {"content": "<|endoftext|>"}}}', "baba")
bpe("unknown", "", "a q\n", '{"pad_token": "<pad>"}', "")
bpe("vocabulary", '{"a": 0, "b</w>": 1, "\\u0100": 2, "": 3}', "a b</w>\n", "", "ab")
put("bpe", "empty", b"")
bpe("twice", '{"a": 0, "a": 1}', "", "[]", "")


def bpe_json(name, model, more=""):
    put("bpe_json", name, ('{"version": "1.0"%s, "model": {"type": "BPE", "end_of_word_suffix": "</w>"%s}}' % (more, model)).encode())


CHARS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 324))]
WHOLE = {t: i for i, t in enumerate([*CHARS, *(c + "</w>" for c in CHARS), "ab", "<|startoftext|>", "<|endoftext|>"])}
bpe_json("whole", ', "vocab": %s, "merges": [["a", "b"]]' % json.dumps(WHOLE), ', "added_tokens": [{"content": "<|endoftext|>"}]')
bpe_json("texts", ', "vocab": {"a": 0}, "merges": ["a b", "\\u0061 c"]')
bpe_json("no-merges", ', "vocab": {"a": 0}')
bpe_json("three", ', "vocab": {"a": 0}, "merges": [["a", "b", "c"]]')
put("bpe_json", "unigram", b'{"model": {"type": "Unigram", "vocab": [["a", 0]]}}')
put("bpe_json", "empty", b"")

put("lines", "small", b'\xef\xbb\xbf{"file_name": "a.png", "text": "A"}\r\n\n{"n": [1, {"file_name": 2}], "file_name": "./b/c.png"}')
put("lines", "twice", b'{"file_name": "a.png"}\n{"file_name": "a.png"}\n')
put("lines", "nameless", b'{"text": "A"}\n  \n{}\n')
put("lines", "no-object", b'[]\n')
put("lines", "empty", b"")

put("csv", "small", b'\xef\xbb\xbffile_name,n,text\r\n./a.png,1,"A, ""B""\r\nC"\r\n\r\nb/c.png,,d')
put("csv", "both", b'text,"file_name",caption\nA,a.png,\nB,b.png,""\nC,c.png,D\n,d.png,\nE,,F\n')
put("csv", "twice", b'file_name,text\na.png,A\n"a.png",B\n')
put("csv", "column-twice", b'file_name,text,text\n')
put("csv", "captions", b'file_name,captions\n')
put("csv", "another", b'id;"name"\n')
put("csv", "quote-inside", b'file_name,text\na.png,A "B"\n')
put("csv", "quote-open", b'file_name,text\na.png,"A\n')
put("csv", "behind-quote", b'file_name,text\na.png,"A"B\n')
put("csv", "return", b'file_name,text\na.png,A\rB\n')
put("csv", "fewer", b'file_name,text\na.png\n')
put("csv", "more", b'file_name,text\na.png,A,B\n')
put("csv", "bounded", b'\0a,b\n1,"345678"\n1,"3456\n89"\n')
put("csv", "empty", b"")
