"""The model's shape, read from config.json alone: `ModelSpec` and `VisionSpec`.

Defines which config keys are read, which are ignored, and which values this architecture allows.
Tensor names are in `modules.py`, weight formats in `weights.py`. Stdlib only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError
from onebox.spec.overrides import apply_overrides
from onebox.spec.states import StateDtype
from onebox.spec.yarn import MAX_POSITION, YARN_KEYS, Yarn, yarn_from_rope

__all__ = ["FULL", "HARMLESS_KEYS", "ModelSpec", "VisionSpec", "read_config", "read_json", "spec_from_config"]

LINEAR = "linear_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class VisionSpec:
    """The vision tower's shape. The tower itself is transformers' code; only its tensors are counted here."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int


@dataclass(frozen=True)
class ModelSpec:
    """All config values that tensor shapes and arithmetic of a Qwen3.5-MoE depend on. Field names are config.json's."""

    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int
    eos_token_id: int | None
    image_token_id: int | None
    video_token_id: int | None
    vision: VisionSpec | None
    is_text_only: bool
    """True for a bare text config: tensors are then named `model.layers.N`, without `language_model`."""
    yarn: Yarn | None = None

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence: max_position_embeddings, or what YaRN stretches it to unless it is that already."""
        if self.yarn is None:
            return self.max_position_embeddings
        is_stretched = self.max_position_embeddings > self.yarn.original_max_position_embeddings
        stretched = self.yarn.max_context_tokens
        return min(stretched, self.max_position_embeddings) if is_stretched else stretched

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def text_prefix(self) -> str:
        return "model." if self.is_text_only else "model.language_model."

    def recurrent_state_bytes(self, state_dtype: StateDtype) -> int:
        """One sequence's DeltaNet matrix state in one layer."""
        count = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        return state_dtype.num_bytes * count

    @property
    def conv_state_bytes_per_layer(self) -> int:
        """One sequence's convolution rows in one layer: the last kernel-1 inputs, bfloat16."""
        return 2 * (self.linear_conv_kernel_dim - 1) * self.conv_dim

    def state_bytes_per_sequence(self, state_dtype: StateDtype) -> int:
        return len(self.linear_layers) * (self.recurrent_state_bytes(state_dtype) + self.conv_state_bytes_per_layer)


# Keys of text_config that hold a size; copied unchanged.
_TEXT_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Keys that select the arithmetic: onebox supports only this value.
_TEXT_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "mtp_use_dedicated_embeddings": False,
    "mamba_ssm_dtype": "float32",
}
# Keys read elsewhere in this file.
_TEXT_READ = {
    "layer_types",
    "full_attention_interval",
    "rms_norm_eps",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "mtp_num_hidden_layers",
    "eos_token_id",
    "model_type",
}
# Keys without effect on inference: training settings, library defaults, provenance.
HARMLESS_KEYS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "draft_vocab_size",  # of the tensor mtp.d2t, which is read with its own size
    "dtype",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_TOP_READ = {
    "text_config",
    "vision_config",
    "model_type",
    "tie_word_embeddings",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "quantization_config",
    "eos_token_id",
    "language_model_only",
    "_hybrid_quant_info",  # held against the tensors in checkpoint/hybrid.py
}
_ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_VISION_SIZES = tuple(VisionSpec.__dataclass_fields__)
_VISION_FIXED: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
    "rope_parameters": {"rope_theta": 10000, "rope_type": "axial"},
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UnreadableError` with the path if it is absent, unreadable or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableError(
            f"{path} does not exist: every checkpoint directory contains it; check the path or pull again."
        ) from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UnreadableError(f"{path} is not valid JSON ({error}): download it again.") from None
    if not isinstance(value, dict):
        raise UnreadableError(f"{path} holds a {type(value).__name__} where a JSON object is expected.")
    return value


def read_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of the checkpoint in `directory`, from its config.json."""
    return spec_from_config(read_json(directory / "config.json"), overrides)


def spec_from_config(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a parsed config.json, with the values of `--hf-overrides` in place of its own.

    Unknown keys and unsupported values are rejected by name.
    """
    if not overrides:
        return _spec(config)
    try:
        return _spec(apply_overrides(config, overrides))
    except UnsupportedError as error:
        raise UsageError(f"With --hf-overrides, {error}") from None


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    model_type = config.get("model_type")
    if model_type == "qwen3_5_moe_text":
        return _text_spec(config, config, None, is_text_only=True)
    if model_type != "qwen3_5_moe":
        raise UnsupportedError(
            f"config.json has model_type {model_type!r}; onebox runs 'qwen3_5_moe' (Qwen3.5-MoE and its siblings)."
        )
    _refuse_unknown(config, _TOP_READ | HARMLESS_KEYS, "")
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedError("config.json has no text_config object: the model's sizes are read from there.")
    vision = config.get("vision_config")
    return _text_spec(text, config, _vision_spec(vision) if vision else None, is_text_only=False)


def _text_spec(
    text: Mapping[str, Any], top: Mapping[str, Any], vision: VisionSpec | None, *, is_text_only: bool
) -> ModelSpec:
    where = "" if is_text_only else "text_config."
    known = {*_TEXT_SIZES, *_TEXT_FIXED} | _TEXT_READ | HARMLESS_KEYS
    _refuse_unknown(text, known | (_TOP_READ if is_text_only else set()), where)
    _refuse_other_values(text, _TEXT_FIXED, where)
    sizes: dict[str, Any] = {key: _positive_int(text, key, where) for key in _TEXT_SIZES}
    if sizes["max_position_embeddings"] > MAX_POSITION:
        raise UnsupportedError(
            f"config.json: {where}max_position_embeddings is {sizes['max_position_embeddings']:,}; onebox computes "
            f"positions below {MAX_POSITION:,}."
        )
    rope = _rope(text, where)
    mtp_layers = text.get("mtp_num_hidden_layers", 0)
    if mtp_layers not in (0, 1):
        raise UnsupportedError(
            f"config.json: {where}mtp_num_hidden_layers is {mtp_layers!r}; onebox supports heads of one layer."
        )
    return ModelSpec(
        **sizes,
        **rope,
        layer_types=_layer_types(text, sizes["num_hidden_layers"], where),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(top.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        mtp_num_hidden_layers=mtp_layers,
        eos_token_id=text.get("eos_token_id"),
        image_token_id=top.get("image_token_id"),
        video_token_id=top.get("video_token_id"),
        vision=vision,
        is_text_only=is_text_only,
    )


def _layer_types(text: Mapping[str, Any], num_layers: int, where: str) -> tuple[str, ...]:
    given = text.get("layer_types")
    if given is None:
        interval = text.get("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))
    kinds = tuple(given)
    if len(kinds) != num_layers:
        raise UnsupportedError(
            f"config.json: {where}layer_types has {len(kinds)} entries for {num_layers} layers; they must be equal."
        )
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise UnsupportedError(f"config.json: {where}layer_types holds {kind!r}; it must be {LINEAR} or {FULL}.")
    return kinds


def _rope(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping):
        raise UnsupportedError(
            f"config.json has no {where}rope_parameters object: rotary constants are read from there."
        )
    inside = f"{where}rope_parameters."
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ("default", "yarn"):
        raise UnsupportedError(
            f"config.json: {inside}rope_type is {rope_type!r}; onebox supports 'default' and 'yarn'."
        )
    is_yarn = rope_type == "yarn"
    _refuse_unknown(rope, _ROPE_KEYS | (YARN_KEYS if is_yarn else set()), inside)
    _refuse_other_values(rope, {"mrope_interleaved": True}, inside)
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    return {
        "rope_theta": float(rope.get("rope_theta", 10_000_000)),
        "partial_rotary_factor": float(factor),
        "mrope_section": tuple(rope.get("mrope_section", (11, 11, 10))),
        "yarn": yarn_from_rope(rope, inside) if is_yarn else None,
    }


def _vision_spec(vision: Mapping[str, Any]) -> VisionSpec:
    where = "vision_config."
    _refuse_unknown(vision, {*_VISION_SIZES, *_VISION_FIXED, "model_type"} | HARMLESS_KEYS, where)
    _refuse_other_values(vision, _VISION_FIXED, where)
    return VisionSpec(**{key: _positive_int(vision, key, where) for key in _VISION_SIZES})


def _positive_int(section: Mapping[str, Any], key: str, where: str) -> int:
    value = section.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedError(f"config.json: {where}{key} is {value!r}; it must be a positive integer.")
    return value


def _refuse_unknown(section: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in section:
        if key not in known:
            raise UnsupportedError(
                f"config.json has the key {where}{key}, which onebox does not know and would ignore; "
                "remove it if it is harmless, or report it if the model needs it."
            )


def _refuse_other_values(section: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    for key, expected in fixed.items():
        if section.get(key, expected) != expected:
            raise UnsupportedError(f"config.json: {where}{key} is {section[key]!r}; onebox supports only {expected!r}.")
