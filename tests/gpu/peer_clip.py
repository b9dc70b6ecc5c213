"""CLIP's text encoder for parity_nets.py, in PyTorch: see peer_nets.py."""
import math

import torch
import torch.nn.functional as F

from peer_nets import write_model

PARTS = ("q_proj", "k_proj", "v_proj")


def clip(w, c, ids, cast):
    """cast: brings a parameter to the precision."""
    def linear(x, name):
        return F.linear(x, cast(w[f"{name}.weight"]), cast(w[f"{name}.bias"]))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], cast(w[f"{name}.weight"]), cast(w[f"{name}.bias"]), 1e-5)

    at = "text_model.embeddings"
    x = cast(w[f"{at}.token_embedding.weight"])[ids.long()] + \
        cast(w[f"{at}.position_embedding.weight"])[:ids.shape[1]]
    for i in range(c["layers"]):
        at = f"text_model.encoder.layers.{i}"
        y = norm(x, f"{at}.layer_norm1")
        q, k, v = (linear(y, f"{at}.self_attn.{p}").unflatten(-1, (c["heads"], -1)).transpose(1, 2) for p in PARTS)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(o.transpose(1, 2).flatten(2), f"{at}.self_attn.out_proj")
        y = linear(norm(x, f"{at}.layer_norm2"), f"{at}.mlp.fc1")
        x = x + linear(y * torch.sigmoid(1.702 * y), f"{at}.mlp.fc2")
    return {"text_hidden": norm(x, "text_model.final_layer_norm")}


def clip_files(folder, c, random):
    d, w = c["d"], {}

    def add(name, out, inputs):
        w[f"{name}.weight"] = random((out, inputs), 1 / math.sqrt(inputs))
        w[f"{name}.bias"] = random((out,), 0.05)

    def add_norm(name):
        w[f"{name}.weight"] = random((d,), 0.1, 1.0)
        w[f"{name}.bias"] = random((d,), 0.1)

    w["text_model.embeddings.token_embedding.weight"] = random((c["vocab"], d), 1)
    w["text_model.embeddings.position_embedding.weight"] = random((77, d), 0.3)
    for i in range(c["layers"]):
        at = f"text_model.encoder.layers.{i}"
        for p in (*PARTS, "out_proj"):
            add(f"{at}.self_attn.{p}", d, d)
        add(f"{at}.mlp.fc1", 4 * d, d)
        add(f"{at}.mlp.fc2", d, 4 * d)
        add_norm(f"{at}.layer_norm1")
        add_norm(f"{at}.layer_norm2")
    add_norm("text_model.final_layer_norm")
    write_model(folder, dict(architectures=["CLIPTextModel"], model_type="clip_text_model", hidden_size=d,
                             intermediate_size=4 * d, num_attention_heads=c["heads"], num_hidden_layers=c["layers"],
                             vocab_size=c["vocab"], max_position_embeddings=77, hidden_act="quick_gelu",
                             layer_norm_eps=1e-5, bos_token_id=c["vocab"] - 2, eos_token_id=c["vocab"] - 1), w, "model")
    return w
