"""The published DFlash drafter of the 122B as its config.json, so that it can be planned without a download."""

from typing import Any

__all__ = ["DFLASH_122B"]

DFLASH_122B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 248077,
        "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
    },
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
"""z-lab/Qwen3.5-122B-A10B-DFlash, the weights of 2026-06-19 and later."""
