"""The model as transformers computes it, under our weights: code we did not write, in float32, on the CPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

from onebox.model.random import TINY, random_weights
from onebox.spec.model import ModelSpec, spec_from_config

# These tensors are too small to share out: more threads only wait for each other.
torch.set_num_threads(1)

# The one tolerance table: the largest difference allowed, relative to the largest magnitude in the oracle's tensor.
TOLERANCE = {torch.float32: 1e-4}

TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "in_channels": 3,
    "intermediate_size": 16,
    "model_type": "qwen3_5_moe",
    "num_heads": 2,
    "num_position_embeddings": 4,
    "out_hidden_size": 128,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def tiny_config(text=None, **top):
    """The tiny model's config with other values in its text part or at its top level."""
    return {**TINY, **top, "text_config": {**TINY["text_config"], **(text or {})}}


def tiny_model(config=TINY, seed=1) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    spec = spec_from_config(config)
    return spec, random_weights(spec, seed=seed, dtype=torch.float32)


def transformers_model(config, weights) -> Qwen3_5MoeForConditionalGeneration:
    """The whole model of transformers with our text weights; its vision tower stays as it is, text never reaches it."""
    hf_config = Qwen3_5MoeConfig(**{**config, "vision_config": TOWER})
    hf_config._attn_implementation = "eager"
    model = Qwen3_5MoeForConditionalGeneration(hf_config).eval().to(torch.float32)
    ours = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    absent, left_over = model.load_state_dict(ours, strict=False)
    assert not left_over, left_over
    tied = {"lm_head.weight"} if hf_config.tie_word_embeddings else set()
    assert all(name.startswith("model.visual.") or name in tied for name in absent), absent
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    assert difference <= TOLERANCE[theirs.dtype] * largest, f"differs by {difference} where the largest is {largest}"
