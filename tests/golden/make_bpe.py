#!/usr/bin/env python3
"""A small CLIP tokenizer, and what transformers makes of nasty captions with it.

    python3 tests/golden/make_bpe.py EMOJI_DATA      (a folder of tar shards: examples/emoji/data)

needs transformers, tokenizers; used by tests/unit/test_bpe.c. Writes tests/golden/bpe/{vocab.json,merges.txt}, a vocabulary
made as CLIP's is (256 bytes, 256 that end a word, merges learned from the captions, two specials), and golden.h: hashes of
the ids of 10,000 strings, 100 a hash, under each of three ways to name the special tokens, and of all captions.

The strings come from a generator (`nasty`) that the test has as well; bytes that are no UTF-8 are U+FFFD here. To the
learned merges come others by which the same token is made of other halves, and whose ranks are below their halves'. The same
command gives the same bytes.
"""
import json
import os
import shutil
import sys
import tarfile
import tempfile
import unicodedata
from collections import Counter

from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import CLIPTokenizer

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bpe")
STRINGS, GROUP, MERGES, MASK = 10000, 100, 900, (1 << 64) - 1
BOS, EOS = "<|startoftext|>", "<|endoftext|>"

SPACES = [0x20, 0x09, 0x0A, 0x0D, 0x0B, 0x85, 0xA0, 0x1680, 0x2003, 0x2028, 0x202F, 0x3000, 0x200B, 0x20, 0x20, 0x20]
PIECES = ["👩‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "#️⃣", "ǅ", "ǈungla", "ΌΔΟΣ", "Σ", "ς", "İ", "Iİ̇i", "ẞ", "ﬁ",
          "Å", "Ω", "가", "각", "각", "é", "é", "ệ", "q̣̇", "क़", "שּׁ",
          "𝅘𝅥", "豈", "'s", "'LL", "it's", "I'VE", "don't", "''s", "'", EOS, BOS, "<|ENDOFTEXT|>", "<|StartOfText|>!!",
          "<|endoftext", "|>", "!", "!!!", "wow!", "½", "²", "٣", "Ⅷ", "１２", "a1b2", "…", "—", "­", "﻿", "�", "ſ",
          "Ǆ", "ᾳ", "ꙋ", "𐐀", "𖹀", "ჰᲰ", "Ꭰꭰ", "日本語", "ไทย", "हिन्दी", "עִבְרִית", "العربية", "한국어"]


class Random:
    """splitmix64"""

    def __init__(self, seed):
        self.s = seed

    def __call__(self, n):
        self.s = (self.s + 0x9E3779B97F4A7C15) & MASK
        z = self.s
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return (z ^ (z >> 31)) % n


def nasty(i):
    r, out = Random(i), []
    for _ in range(1 + r(12)):
        kind = r(14)
        if kind <= 2:
            out += [chr((97 if r(3) else 65) + r(26)) for _ in range(1 + r(8))]
        elif kind == 3:
            out.append(chr(SPACES[r(len(SPACES))]))
        elif kind <= 5:
            out.append(PIECES[r(len(PIECES))])
        elif kind == 6:
            out += [chr(0x300 + r(0x70)) for _ in range(1 + r(5))]
        elif kind == 7:
            out += [chr(0x4E00 + r(20000)) for _ in range(1 + r(3))]
        elif kind == 8:
            out += [chr(0x600 + r(0x100)) for _ in range(1 + r(4))]
        elif kind == 9:
            out += [chr(0x1100 + r(0x100)) for _ in range(1 + r(5))]
        elif kind == 10:
            out.append(chr(1 + r(31) if r(2) else 127 + r(33)))
        elif kind == 11:
            out += [chr(0xA0 + r(0x2F00)) for _ in range(1 + r(3))]
        elif kind == 12:
            r(66)  # which bad byte
            out.append("\ufffd")
        elif r(20) == 0:
            out += [chr(97 + r(4)) for _ in range(300 + r(300))]
        else:
            out += [chr(48 + r(10)) for _ in range(1 + r(4))]
    return "".join(out)


def skipped():
    """Strings whose normal form the tokenizers library makes otherwise than Unicode 14: its table of marks is older, and
    these hold newer ones."""
    ours, theirs = lambda s: unicodedata.normalize("NFC", s), normalizers.NFC().normalize_str
    return [i for i in range(STRINGS) if ours(nasty(i)) != theirs(nasty(i))]


def captions(folder):
    for name in sorted(os.listdir(folder)):
        if name.endswith(".tar"):
            with tarfile.open(os.path.join(folder, name)) as tar:
                for m in tar:
                    if m.name.endswith(".txt"):
                        yield tar.extractfile(m).read().decode().strip()


def byte_chars():
    prints = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in prints]
    return [chr(b) for b in prints] + [chr(256 + i) for i in range(len(rest))]


def words_of(texts):
    """How often each word comes, as characters of bytes of which the last ends it."""
    normal = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    pattern = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = Counter(w for text in texts for w, _ in split.pre_tokenize_str(normal.normalize_str(text)))
    return {(*w[:-1], w[-1] + "</w>"): n for w, n in words.items()}


def merged(word, pair):
    out = []
    for c in word:
        if out and (out[-1], c) == pair:
            out[-1] += c
        else:
            out.append(c)
    return tuple(out)


def learn(words):
    """The most frequent pair each time; of several the first by code points."""
    merges = []
    for _ in range(MERGES):
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        merges.append(min(pairs, key=lambda p: (-pairs[p], p)))
        words = {merged(word, merges[-1]): n for word, n in words.items()}
    return merges


def vocabulary(texts):
    merges = learn(words_of(texts))
    tokens = [*byte_chars(), *(c + "</w>" for c in byte_chars())]
    tokens += [t for t in dict.fromkeys(a + b for a, b in merges) if t not in set(tokens)]
    known, r, more = set(tokens), Random(1), []
    for a, b in merges[::7]:  # the same token from other halves
        whole = a + b
        for cut in range(1, len(whole)):
            pair = (whole[:cut], whole[cut:])
            if pair[0] in known and pair[1] in known and pair not in merges + more:
                more.append(pair)
                break
    for pair in more:
        merges.insert(r(len(merges)), pair)
    return {t: i for i, t in enumerate([*tokens, BOS, EOS])}, merges


def special(text, **flags):
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, **flags}


def variants():
    """The folder's further files: none; as SD 2 has them; as SDXL's second tokenizer, where the map does not count."""
    named = {"bos_token": special(BOS, normalized=True), "eos_token": special(EOS, normalized=True),
             "unk_token": special(EOS, normalized=True), "pad_token": "!"}
    added = {str(VOCAB[t]): special(t, special=True, normalized=t != "!") for t in (BOS, EOS, "!")}
    config = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": "!", "added_tokens_decoder": added}
    return [{}, {"special_tokens_map.json": named, "tokenizer_config.json": {"pad_token": EOS}},
            {"tokenizer_config.json": config, "special_tokens_map.json": {"pad_token": EOS}}]


def fold(h, ids):
    for x in [len(ids), *ids]:
        h = ((h ^ x) * 0x100000001B3 + 1) & MASK
    return h


def cut(t, text, length):
    ids = t(text, add_special_tokens=False)["input_ids"][:length - 2]
    ids = [t.bos_token_id, *ids, t.eos_token_id]
    return ids + [t.pad_token_id] * (length - len(ids))


def hashes(t, strings):
    ret = []
    for i, s in enumerate(strings):
        if i % GROUP == 0:
            ret.append(0xCBF29CE484222325)
        ret[-1] = fold(fold(ret[-1], cut(t, s, 77)), cut(t, s, 900))
    return ret


def c_text(s):
    return '"' + "".join(f"\\{b:03o}" for b in s.encode()) + '"'


def emit(f, name, rows):
    f.write(f"static const uint64_t {name}[{len(rows)}] = {{\n")
    for i in range(0, len(rows), 4):
        f.write("    " + " ".join(f"0x{x:016x}," for x in rows[i:i + 4]) + "\n")
    f.write("};\n")


TEXTS = list(captions(sys.argv[1]))
VOCAB, RULES = vocabulary(TEXTS)
SKIPPED = skipped()
assert 0 < len(SKIPPED) < 10
os.makedirs(OUT, exist_ok=True)
with open(f"{OUT}/vocab.json", "w", encoding="utf-8") as out:
    json.dump(VOCAB, out, ensure_ascii=False)
    out.write("\n")
with open(f"{OUT}/merges.txt", "w", encoding="utf-8") as out:
    out.write("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in RULES))
with open(f"{OUT}/golden.h", "w", encoding="utf-8") as out:
    out.write("/* Made by make_bpe.py; do not edit. */\n#pragma once\n#include <stdint.h>\n\n")
    out.write("static const int NASTY_SPACES[] = {" + ", ".join(str(c) for c in SPACES) + "};\n")
    out.write("static const char *const NASTY_PIECES[] = {\n" + "".join(f"    {c_text(p)},\n" for p in PIECES) + "};\n")
    out.write("/* See make_bpe.py. */\nstatic const int NASTY_SKIPPED[] = {" + ", ".join(map(str, SKIPPED)) + "};\n")
    for k, files in enumerate(variants()):
        with tempfile.TemporaryDirectory() as d:
            for name in ("vocab.json", "merges.txt"):
                shutil.copy(f"{OUT}/{name}", d)
            for name, content in files.items():
                with open(f"{d}/{name}", "w") as g:
                    json.dump(content, g)
            t = CLIPTokenizer.from_pretrained(d)
            for s in TEXTS[:50]:  # what the class does by itself
                own = t(s, padding="max_length", truncation=True, max_length=77)["input_ids"]
                assert own == cut(t, s, 77), s
            emit(out, f"NASTY_{k}", hashes(t, ["" if i in SKIPPED else nasty(i) for i in range(STRINGS)]))
            for name, content in files.items():
                tag = "MAP" if "map" in name else "CONFIG"
                out.write(f"static const char {tag}_{k}[] = {json.dumps(json.dumps(content))};\n")
            if k == 0:
                emit(out, "EMOJI", hashes(t, TEXTS))
                emoji = [t(s, add_special_tokens=False)["input_ids"] for s in TEXTS]
print(f"{len(VOCAB)} tokens, {len(RULES)} merges, {len(TEXTS)} captions, "
      f"{sum(map(len, emoji)) / len(emoji):.1f} tokens a caption")
