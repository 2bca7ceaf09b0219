"""The published models' configs by name, so that `onebox plan qwen3.5-122b-a10b` needs no download.

Values and structure are those of the published config.json files, so that `model.py` parses both.
"""

from collections.abc import Mapping
from typing import Any

from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec, spec_from_config

__all__ = ["SHAPES", "family_config", "is_known", "named_spec"]


def family_config(
    *,
    text: dict[str, Any],
    vision: dict[str, Any] | None = None,
    has_vision: bool = True,
    first_special_token: int = 248044,
) -> dict[str, Any]:
    """A config.json of the family: `text` and `vision` override the values that all published models share.

    Special token ids keep their offsets from `first_special_token` (<|endoftext|>), so that a small vocabulary works.
    """
    base = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": first_special_token,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "use_cache": True,
        "vocab_size": 248320,
    }
    tower = {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": first_special_token + 12,
        "model_type": "qwen3_5_moe",
        "text_config": {**base, **text},
        "tie_word_embeddings": False,
        "video_token_id": first_special_token + 13,
        "vision_end_token_id": first_special_token + 10,
        "vision_start_token_id": first_special_token + 9,
    }
    if has_vision:
        config["vision_config"] = {**tower, "out_hidden_size": text["hidden_size"], **(vision or {})}
    return config


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-122b-a10b": family_config(
        text={
            "hidden_size": 3072,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "linear_num_value_heads": 64,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        }
    ),
    # Its size decides what a box can hold; the values are those of its model card (Qwen/Qwen3.5-397B-A17B).
    "qwen3.5-397b-a17b": family_config(
        text={
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "linear_num_value_heads": 64,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        }
    ),
    "qwen3.5-35b-a3b": family_config(
        text={
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        }
    ),
}
SHAPES["qwen3.6-35b-a3b"] = SHAPES["qwen3.5-35b-a3b"]


def named_spec(name: str, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a published model by its short name, with or without `Qwen/` and in any case.

    `overrides` are those of `--hf-overrides`.
    """
    if not is_known(name):
        raise UsageError(f"{name!r} is neither a directory nor a known model; the known ones are {', '.join(SHAPES)}.")
    return spec_from_config(SHAPES[_key(name)], overrides)


def is_known(name: str) -> bool:
    """Whether `named_spec` knows a model of this name."""
    return _key(name) in SHAPES


def _key(name: str) -> str:
    return name.lower().removeprefix("qwen/")
