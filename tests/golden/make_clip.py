#!/usr/bin/env python3
"""Small CLIP text encoders with random weights, and what transformers computes with them in fp64.

    python3 tests/golden/make_clip.py [OUT=tests/golden/encoders]

needs torch, transformers, safetensors; used by tests/unit/test_clip.c. Each folder is a model as the ecosystem lays it out
(config.json and weights) and golden.safetensors: ids, and the four outputs computed from the weights as saved.

  clip_l      as L: quick_gelu, CLIPTextModel, eos_token_id 2 (the largest id is the end), fp32
  clip_h      as H: erf-GELU, CLIPTextModel, eos_token_id of the vocabulary, two shards with an index, fp16
  clip_bigg   as bigG: erf-GELU, CLIPTextModelWithProjection, bf16
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

torch.set_grad_enabled(False)
OUT = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/encoders"
VOCAB, LENGTH, PREFIX = 53, 11, "text_model."


def randomize(model, seed):
    """Every parameter away from its special initial value, activations of order 1."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if p.dim() == 1:
            p.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.2 * noise)
        else:
            p.copy_(noise if "embedding" in name else noise / p[0].numel() ** 0.5)


def captions():
    """Padded with the end (L) or with 0 (H, bigG); one full, one without an end, one with two."""
    end = VOCAB - 1
    ids = [[VOCAB - 2, 5, 9, 0, 3, end], [VOCAB - 2, *range(1, LENGTH - 1), end], [VOCAB - 2, end],
           [VOCAB - 2, 7, end, 8, end]]
    return ids + [[VOCAB - 2, *range(20, 20 + LENGTH - 1)]]


def files(path, state, shards):
    names = sorted(state)
    if shards == 1:
        return save_file(state, f"{path}/model.safetensors", metadata={"format": "pt"})
    parts = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {k: parts[i * shards // len(names)] for i, k in enumerate(names)}
    for part in parts:
        save_file({k: state[k] for k in names if where[k] == part}, f"{path}/{part}")
    with open(f"{path}/model.safetensors.index.json", "w") as f:
        json.dump({"metadata": {}, "weight_map": where}, f, indent=1, sort_keys=True)
        f.write("\n")


def clip(name, kind, dtype, seed, shards=1, pad=0, **config):
    path = f"{OUT}/{name}"
    os.makedirs(path, exist_ok=True)
    c = CLIPTextConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, attention_dropout=0.0, **config)
    c.architectures = [kind.__name__]
    model = kind(c).eval()
    randomize(model, seed)
    # transformers 5 has no prefix in memory, files have it
    state = {k if k.startswith((PREFIX, "text_projection")) else PREFIX + k: v.to(dtype).contiguous()
             for k, v in model.state_dict().items() if "position_ids" not in k}
    files(path, state, shards)
    c.to_json_file(f"{path}/config.json", use_diff=False)
    model = model.double()
    own = model.state_dict()
    model.load_state_dict({k: state[k if k in state else PREFIX + k].double() if "position_ids" not in k else v
                           for k, v in own.items()})
    ids = torch.tensor([row + [pad] * (LENGTH - len(row)) for row in captions()])
    y = model(input_ids=ids, output_hidden_states=True)
    text = getattr(model, "text_model", model)
    inner = y if kind is CLIPTextModel else text(input_ids=ids, output_hidden_states=True)
    assert len(inner.hidden_states) == c.num_hidden_layers + 1
    golden = {"token_ids": ids.int(), "states": inner.last_hidden_state, "pooled": inner.pooler_output,
              "penultimate": inner.hidden_states[-2]}
    if kind is CLIPTextModelWithProjection:
        golden["embeds"] = y.text_embeds
    save_file({k: v if v.dtype == torch.int32 else v.float().contiguous() for k, v in golden.items()},
              f"{path}/golden.safetensors")


clip("clip_l", CLIPTextModel, torch.float32, 1, pad=VOCAB - 1, hidden_size=24, intermediate_size=40,
     num_hidden_layers=3, num_attention_heads=3, projection_dim=24, hidden_act="quick_gelu", eos_token_id=2)
clip("clip_h", CLIPTextModel, torch.float16, 2, shards=2, hidden_size=35, intermediate_size=51,
     num_hidden_layers=2, num_attention_heads=5, projection_dim=16, hidden_act="gelu", eos_token_id=VOCAB - 1)
clip("clip_bigg", CLIPTextModelWithProjection, torch.bfloat16, 3, hidden_size=34, intermediate_size=50,
     num_hidden_layers=4, num_attention_heads=2, projection_dim=13, hidden_act="gelu", eos_token_id=VOCAB - 1)
