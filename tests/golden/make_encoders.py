#!/usr/bin/env python3
"""Small encoders with random weights and what transformers and diffusers compute with them.

    python3 tests/golden/make_encoders.py [OUT=tests/golden/encoders]

needs torch, transformers, diffusers, safetensors; used by tests/unit/test_t5.c and
test_autoencoder.c. Each folder is a model as the ecosystem lays it out (config.json and weights) and
golden.safetensors: inputs and outputs, computed in fp64 from the weights as saved.

  t5_relu    v1.0: ReLU, 2 layers, heads x d_kv != d_model, odd length beyond max_distance, a whole
             T5Model (the decoder must be ignored) in bf16, two shards with an index
  t5_gated   v1.1: gated GELU, 3 layers, fp32, the encoder alone with encoder.embed_tokens only
  vae_deep   4 blocks, layers_per_block 2, 8 groups, mid attention, both quant convs, fp16, a
             log-variance that is clamped at both ends, pictures that are not square
  vae_plain  2 blocks, no mid attention, no quant convs, fp32
  vae_old    1 layer, bf16, the old names of the attention's projections, quant_conv only
  vae_sd3    4 blocks, 16 channels of the latent, which is shifted and scaled, no quant convs, bf16, as SD3 and FLUX have it
"""
import json
import os
import sys

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel, T5Model

torch.set_grad_enabled(False)
OUT = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/encoders"


def randomize(model, seed):
    """Every parameter away from its special initial value, activations of order 1."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if p.dim() == 1:
            one = name.endswith("weight")
            p.copy_((1.0 if one else 0.0) + 0.2 * noise)
        elif "relative_attention_bias" in name or "embed" in name or "shared" in name:
            p.copy_(noise)
        else:
            p.copy_(noise / p[0].numel() ** 0.5)


def t5(name, ff, layers, length, dtype, whole, seed):
    path = f"{OUT}/{name}"
    os.makedirs(path, exist_ok=True)
    config = T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=layers, num_decoder_layers=1,
        num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        feed_forward_proj=ff, dropout_rate=0.0)
    model = T5Model(config).eval()
    randomize(model, seed)
    state = {k: v.to(dtype).contiguous() for k, v in model.state_dict().items()}
    for k in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        state.pop(k, None)
    if whole:
        half = len(state) // 2
        names = sorted(state)
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        where = {k: files[i >= half] for i, k in enumerate(names)}
        for f in files:
            save_file({k: state[k] for k in names if where[k] == f}, f"{path}/{f}")
        with open(f"{path}/model.safetensors.index.json", "w") as f:
            json.dump({"metadata": {}, "weight_map": where}, f, indent=1, sort_keys=True)
            f.write("\n")
    else:
        encoder = {k: v for k, v in state.items() if k.startswith("encoder.")}
        encoder["encoder.embed_tokens.weight"] = state["shared.weight"]
        save_file(encoder, f"{path}/model.safetensors")
    config.to_json_file(f"{path}/config.json", use_diff=False)

    reference = T5EncoderModel(config).double().eval()
    missing, _ = reference.load_state_dict({k: v.double() for k, v in state.items()}, strict=False)
    assert all("embed_tokens" in k for k in missing), missing
    reference.encoder.embed_tokens.weight.copy_(state["shared.weight"].double())
    g = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(2, config.vocab_size, (5, length), generator=g)
    for row, n in enumerate([length, 1, 2, length // 2, length - 1]):
        ids[row, n - 1] = 1
        ids[row, n:] = 0
    hidden = reference(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    save_file({"token_ids": ids.int(), "text_hidden": hidden.float()}, f"{path}/golden.safetensors")


OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def vae(name, size, dtype, seed, clamp=False, old_names=False, **kwargs):
    path = f"{OUT}/{name}"
    os.makedirs(path, exist_ok=True)
    blocks = len(kwargs["block_out_channels"])
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks, norm_num_groups=8, **kwargs).eval()
    randomize(model, seed)
    last = model.quant_conv if model.quant_conv is not None else model.encoder.conv_out
    if clamp:
        c = model.config.latent_channels
        last.bias[c] = 20.0
        last.bias[c + 1] = -30.0
    state = {k: v.to(dtype).contiguous() for k, v in model.state_dict().items()}
    model = model.double()
    model.load_state_dict({k: v.double() for k, v in state.items()})
    if old_names:
        for new, old in OLD.items():
            state = {k.replace(f".{new}.", f".{old}."): v for k, v in state.items()}
    save_file(state, f"{path}/diffusion_pytorch_model.safetensors")
    model.save_config(path)

    g = torch.Generator().manual_seed(seed + 1)
    pixels = torch.randint(0, 256, (3, 3, *size), generator=g, dtype=torch.uint8)
    posterior = model.encode(pixels.double() / 127.5 - 1).latent_dist
    decoded = model.decode(posterior.mean).sample
    save_file({"pixels": pixels, "latent_mean": posterior.mean.float().contiguous(),
               "latent_logvar": posterior.logvar.float().contiguous(),
               "decoded": decoded.float().contiguous()}, f"{path}/golden.safetensors")
    if clamp:
        assert (posterior.logvar == 20).any() and (posterior.logvar == -30).any()
        assert ((posterior.logvar > -30) & (posterior.logvar < 20)).any()


t5("t5_relu", "relu", 2, 37, torch.bfloat16, True, 1)
t5("t5_gated", "gated-gelu", 3, 7, torch.float32, False, 2)
vae("vae_deep", (16, 24), torch.float16, 3, clamp=True, block_out_channels=(8, 8, 16, 16),
    layers_per_block=2, latent_channels=3)
vae("vae_plain", (8, 6), torch.float32, 4, block_out_channels=(8, 16), layers_per_block=1,
    mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False)
vae("vae_old", (6, 8), torch.bfloat16, 5, old_names=True, block_out_channels=(16, 8),
    layers_per_block=1, use_post_quant_conv=False)
vae("vae_sd3", (16, 24), torch.bfloat16, 6, block_out_channels=(8, 8, 16, 16), layers_per_block=1,
    latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False,
    use_post_quant_conv=False)
for name in sorted(os.listdir(OUT)):
    bytes_ = sum(os.path.getsize(f"{OUT}/{name}/{f}") for f in os.listdir(f"{OUT}/{name}"))
    print(f"{name}: {bytes_} bytes, {len(load_file(f'{OUT}/{name}/golden.safetensors'))} tensors")
