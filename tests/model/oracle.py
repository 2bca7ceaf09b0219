"""The model as transformers computes it, under our weights: code we did not write, in float32, on the CPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

from onebox.model.random import TINY, random_weights
from onebox.model.random_text import FIRST_SPECIAL_TOKEN
from onebox.spec.model import ModelSpec, spec_from_config
from onebox.spec.modules import ModuleClass, modules

# These tensors are too small to share out: more threads only wait for each other.
torch.set_num_threads(1)

# The one tolerance table: the largest difference allowed, relative to the largest magnitude in the oracle's tensor.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

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


def loud_model(config) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Weights so large that no part of the model is a whisper beside the embedding, the tower's included."""
    spec, weights = tiny_model(config)
    for name, tensor in weights.items():
        if tensor.ndim > 1 and not name.endswith("conv1d.weight"):
            tensor *= 2
        elif "norm" in name and "linear_attn" not in name:
            tensor *= 10
    random = torch.Generator().manual_seed(2)
    for module in modules(spec):
        if module.module_class is ModuleClass.VISION:
            weights[module.plain_tensor] = torch.randn(module.shape, generator=random) * 0.2
    return spec, weights


def transformers_model(config, weights) -> Qwen3_5MoeForConditionalGeneration | Qwen3_5MoeForCausalLM:
    """The whole model of transformers with our weights; a tower that we have no weights for stays as it is."""
    if "text_config" in config:
        hf_config = Qwen3_5MoeConfig(**{**config, "vision_config": dict(config.get("vision_config") or TOWER)})
        model_class = Qwen3_5MoeForConditionalGeneration
    else:
        hf_config, model_class = Qwen3_5MoeTextConfig(**config), Qwen3_5MoeForCausalLM
    hf_config._attn_implementation = "eager"
    model = model_class(hf_config).eval().to(torch.float32)
    ours = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    absent, left_over = model.load_state_dict(ours, strict=False)
    assert not left_over, left_over
    tied = {"lm_head.weight"} if hf_config.tie_word_embeddings else set()
    has_tower = any(name.startswith("model.visual.") for name in ours)
    assert all(name in tied or (name.startswith("model.visual.") and not has_tower) for name in absent), absent
    return model


def token_ids(count, seed=0) -> torch.Tensor:
    """Random tokens of text: none of them stands for an image."""
    return torch.randint(FIRST_SPECIAL_TOKEN, (count,), generator=torch.Generator().manual_seed(seed))


def clear_logits(model, spec, ids, **inputs) -> torch.Tensor:
    """Their logits of a prompt in which no token's choice of experts is a coin toss.

    Where the last expert chosen and the first not chosen are equal up to rounding, two right float32 models choose
    differently and their logits part; such a prompt says nothing. If this fails, draw other tokens.
    """
    theirs = model(ids[None], output_router_logits=True, **inputs)
    chosen = spec.num_experts_per_tok
    if chosen < spec.num_experts:
        for layer in theirs.router_logits:
            ranked = layer.sort(dim=-1, descending=True).values
            assert (ranked[:, chosen - 1] - ranked[:, chosen]).min() > 3e-5, "a tie decides: choose another seed"
    return theirs.logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, dtype=torch.float32) -> None:
    assert ours.shape == theirs.shape
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    assert difference <= TOLERANCE[dtype] * largest, f"differs by {difference} where the largest is {largest}"
