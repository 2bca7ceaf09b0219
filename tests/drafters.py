"""Small DFlash drafters for tests: configs of every mask, random weights, and their directories."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from onebox.spec.dflash import DFlashSpec
from onebox.spec.dflash_config import drafter_from_config


def small_drafter_config(target: dict, **changes) -> dict:
    """A drafter's config.json for a target's config: three layers of both kinds, a window of 6, a block of 8."""
    text = target["text_config"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "dflash_config": {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [0, 2, 3]},
        "dtype": "bfloat16",
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 4096,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_target_layers": text["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 6,
        "use_sliding_window": True,
        "vocab_size": text["vocab_size"],
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def random_drafter_weights(spec: DFlashSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 weights by plain name: norms around 1, matrices so large that no part is a whisper."""
    random = torch.Generator().manual_seed(seed)
    return {
        module.plain_tensor: torch.randn(module.shape, generator=random)
        * (module.shape[-1] ** -0.5 if module.is_matrix else 0.3)
        + (0.0 if module.is_matrix else 1.0)
        for module in spec.modules()
    }


def write_drafter(directory: Path, config: dict, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """A drafter's directory with these weights, BF16; random ones by default."""
    if weights is None:
        weights = random_drafter_weights(drafter_from_config(config))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory
