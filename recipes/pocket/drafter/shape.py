"""The pocket drafter's shape: the 122B drafter's architecture, both layer kinds, in 3.9 million parameters.

Sides of matrices are multiples of 128, so that its INT4 and FP8 builds are those of the large drafter.
"""

from typing import Any

from onebox.spec.model import ModelSpec

__all__ = ["drafter_config"]

_MASK_OFFSET = 19
"""The mask is <|fim_pad|>, which no text of the pocket model has: so many tokens behind <|endoftext|>."""


def drafter_config(target: ModelSpec) -> dict[str, Any]:
    """The config.json of a drafter for a model of this shape."""
    layers = target.num_hidden_layers
    if target.eos_token_id is None:
        raise ValueError("The mask's id is counted from <|endoftext|>, and the model's config has no eos_token_id.")
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": target.eos_token_id + _MASK_OFFSET,
            "target_layer_ids": sorted({*range(0, layers, 2), layers - 1}),
        },
        "dtype": "bfloat16",
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": 1024,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": target.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_target_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": 512,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": target.vocab_size,
    }
