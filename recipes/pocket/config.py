"""The pocket model's shape: the whole architecture in 18 million parameters.

Sides of quantized matrices are multiples of 128, so every format of the large models applies. As in the large models,
the embedding and the LM head are two matrices. 38 MB of BF16 leave room for ten experts a layer.
"""

from typing import Any

from onebox.model.random_text import FIRST_SPECIAL_TOKEN, PADDED_VOCAB_SIZE
from onebox.spec.model import ModelSpec
from onebox.spec.modules import modules
from onebox.spec.shapes import family_config

__all__ = ["TOY", "VOCAB_SIZE", "num_parameters", "pocket_config"]

VOCAB_SIZE = 8192

_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [3, 3, 2],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
_TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 10,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": _ROPE,
    "vocab_size": VOCAB_SIZE,
}


def pocket_config(first_special_token: int) -> dict[str, Any]:
    """The pocket model's config.json; `first_special_token` is the id of <|endoftext|>. There is no vision tower."""
    return family_config(text=_TEXT, has_vision=False, first_special_token=first_special_token)


TOY: dict[str, Any] = family_config(
    text={
        **_TEXT,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "vocab_size": PADDED_VOCAB_SIZE,
    },
    has_vision=False,
    first_special_token=FIRST_SPECIAL_TOKEN,
)
"""A config small enough to train on a CPU, for tests and for `--toy`. Its tokens are bytes."""


def num_parameters(spec: ModelSpec) -> int:
    return sum(module.numel for module in modules(spec))
