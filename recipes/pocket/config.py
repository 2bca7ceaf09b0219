"""The pocket model's shape: the whole architecture in 28 million parameters.

Sides of quantized matrices are multiples of 128, so every format of the large models applies. As in the large models,
the embedding and the LM head are two matrices. The text model has 18.1 M parameters (ten experts a layer), the tower
10.2 M, together 56.5 MB of BF16. The tower is not quantized, and computes once for a picture: a token costs what it
costs without one.
"""

from typing import Any

from onebox.model.random_text import FIRST_SPECIAL_TOKEN, PADDED_VOCAB_SIZE
from onebox.spec.model import ModelSpec
from onebox.spec.modules import modules
from onebox.spec.shapes import family_config

__all__ = ["SEEING_TOY", "TOY", "VOCAB_SIZE", "num_parameters", "pocket_config", "processor_configs"]

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


_VISION: dict[str, Any] = {
    "depth": 6,
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_heads": 5,
    "num_position_embeddings": 1024,
}
PICTURE_PIXELS = (1_024, 1_048_576)
"""The fewest and the most pixels of a picture: 1 token of 32 x 32 pixels, and 1,024. A short line keeps its size."""


def pocket_config(first_special_token: int, *, sees: bool = False) -> dict[str, Any]:
    """The pocket model's config.json; `first_special_token` is the id of <|endoftext|>.

    The first stage of training has no tower; with `sees` it has one.
    """
    return family_config(text=_TEXT, vision=_VISION, has_vision=sees, first_special_token=first_special_token)


def processor_configs() -> dict[str, dict[str, Any]]:
    """How pictures become patches, by file name: the keys of the family's own files."""
    fewest, most = PICTURE_PIXELS
    common = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "size": {"longest_edge": most, "shortest_edge": fewest},
    }
    return {
        "preprocessor_config.json": {
            **common, "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "video_preprocessor_config.json": {
            **common, "processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor",
            "fps": 2, "min_frames": 4, "max_frames": 64,
        },
    }  # fmt: skip


_TOY_TEXT = {
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
}
TOY: dict[str, Any] = family_config(text=_TOY_TEXT, has_vision=False, first_special_token=FIRST_SPECIAL_TOKEN)
"""A config small enough to train on a CPU, for tests and for `--toy`. Its tokens are bytes."""
SEEING_TOY: dict[str, Any] = family_config(
    text=_TOY_TEXT,
    vision={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16},
    first_special_token=FIRST_SPECIAL_TOKEN,
)
"""The same with a tower."""


def num_parameters(spec: ModelSpec) -> int:
    return sum(module.numel for module in modules(spec))
