"""Reads a DFlash drafter's config.json strictly: keys inside `dflash_config` count first, then those at top level.

What a config leaves out is not guessed: taps, mask id, block size and rope theta decide the acceptance, and a wrong
value shows nowhere else. Drafters of other kinds are refused by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onebox.spec.dflash import SLIDING, DFlashSpec
from onebox.spec.errors import UnsupportedError
from onebox.spec.model import FULL, HARMLESS_KEYS, read_json

__all__ = ["drafter_from_config", "is_drafter_config", "read_drafter_config"]

_ARCHITECTURE = "DFlashDraftModel"
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Keys that select the arithmetic: onebox supports only this value. They may stand in dflash_config too.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "is_neox_style": True,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": None,
    "use_aux_hidden_state": True,
    "sample_from_anchor": False,
    "has_own_lm_head": False,
}
# Keys of the successors, with the value at which they do nothing.
_DFLASH2: dict[str, Any] = {
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "input_embedding_scale": 1.0,
}
_READ = {
    "architectures",
    "model_type",
    "dflash_config",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window",
    "swa_window_size",
    "use_swa",
    "is_causal",
    "causal",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "num_target_layers",
    "target_hidden_size",
    "quantization_config",
}
# The drafter takes embeddings and logits from its target, so nothing is tied; auto_map names training code.
_HARMLESS = HARMLESS_KEYS | {"tie_word_embeddings", "auto_map", "eos_token_id"}
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a block drafter (of any kind, supported or not), not a model."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("DFlash" in str(name) or "DSpark" in str(name) for name in names)
    return named or "dflash_config" in config or "speculators_model_type" in config


def read_drafter_config(directory: Path) -> DFlashSpec:
    """The spec of the drafter in `directory`, from its config.json."""
    return drafter_from_config(read_json(directory / "config.json"))


def drafter_from_config(config: Mapping[str, Any]) -> DFlashSpec:
    """The spec of a parsed config.json. Unknown keys, missing keys and unsupported values are refused by name."""
    values = _Values(config)
    _refuse_other_kinds(values)
    _refuse_unknown_keys(values)
    _refuse_other_values(values)
    sizes = {key: values.positive_int(key) for key in _SIZES}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise UnsupportedError(
            f"The drafter's config.json has {sizes['num_attention_heads']} num_attention_heads for "
            f"{sizes['num_key_value_heads']} num_key_value_heads; each KV head must serve equally many."
        )
    kinds = _layer_types(values, sizes["num_hidden_layers"])
    return DFlashSpec(
        **sizes,
        layer_types=kinds,
        rms_norm_eps=_rms_norm_eps(values),
        rope_theta=_rope_theta(values),
        sliding_window=_window(values) if SLIDING in kinds else None,
        is_causal=_is_causal(values),
        target_layer_ids=_taps(values),
        mask_token_id=_mask_token_id(values, sizes["vocab_size"]),
        block_size=_block_size(values),
        num_target_layers=values.positive_int("num_target_layers") if values.has("num_target_layers") else None,
    )


class _Values:
    """A config whose keys may stand in `dflash_config`, which counts first, or at top level."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("dflash_config", {})
        if not isinstance(inner, Mapping):
            raise UnsupportedError(
                f"The drafter's config.json: dflash_config is {inner!r}; it must be an object of DFlash's own keys."
            )
        self._top, self._inner = config, inner

    @property
    def keys(self) -> Iterator[str]:
        """All keys with their place."""
        yield from self._top
        yield from (f"dflash_config.{key}" for key in self._inner)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """The value of `key`; None if it is absent or null."""
        inside = self._inner.get(key)
        return self._top.get(key) if inside is None else inside

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedError(
                f"The drafter's config.json has no {key}, neither in dflash_config nor at top level: acceptance "
                "depends on it and onebox does not guess it; take it from the drafter's publisher."
            )
        return value

    def positive_int(self, key: str) -> int:
        value = self.require(key)
        if not _is_int(value) or value <= 0:
            raise UnsupportedError(f"The drafter's config.json: {key} is {value!r}; it must be a positive integer.")
        return int(value)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise UnsupportedError(f"The drafter's config.json: {key} is {value!r}; it must be true or false.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_other_kinds(values: _Values) -> None:
    if values.has("speculators_model_type") or values.has("speculators_config"):
        raise UnsupportedError(
            "The drafter's config.json is in the form of the speculators library (speculators_model_type); onebox "
            "reads DFlash drafters in z-lab's form: architectures ['DFlashDraftModel'] and dflash_config."
        )
    names = values.get("architectures") or []
    given = names[0] if isinstance(names, list) and len(names) == 1 else names
    if any("DSpark" in str(name) for name in names) or any("markov" in key for key in values.keys):
        raise UnsupportedError(
            "The drafter is of the kind DSpark (a Markov head and a confidence head), which onebox does not run; it "
            "runs DFlash drafters (architectures ['DFlashDraftModel'])."
        )
    second = next((key for key, idle in _DFLASH2.items() if values.get(key) not in (None, idle)), None)
    if given == "DFlash2DraftModel" or second:
        what = f"its config.json has {second}" if second else "its architecture is DFlash2DraftModel"
        raise UnsupportedError(
            f"The drafter is of the kind DFlash2 ({what}: convolutions and a candidate selector), which onebox does "
            "not run; it runs DFlash drafters (architectures ['DFlashDraftModel'])."
        )
    if given != _ARCHITECTURE or values.get("model_type") != "qwen3":
        raise UnsupportedError(
            f"The drafter's config.json has architectures {names!r} and model_type {values.get('model_type')!r}; "
            f"onebox runs block drafters of architectures ['{_ARCHITECTURE}'] and model_type 'qwen3'."
        )


def _refuse_unknown_keys(values: _Values) -> None:
    known = {*_SIZES, *_FIXED, *_DFLASH2} | _READ | _HARMLESS
    for key in values.keys:
        if key.removeprefix("dflash_config.") not in known:
            raise UnsupportedError(
                f"The drafter's config.json has the key {key}, which onebox does not know and would ignore; remove it "
                "if it is harmless, or report it if the drafter needs it."
            )


def _refuse_other_values(values: _Values) -> None:
    for key, expected in _FIXED.items():
        value = values.get(key)
        if value is not None and value != expected:
            raise UnsupportedError(
                f"The drafter's config.json: {key} is {value!r}; onebox supports only {expected!r} in drafters."
            )
    size = values.get("target_hidden_size")
    if size is not None and size != values.get("hidden_size"):
        raise UnsupportedError(
            f"The drafter's config.json: target_hidden_size is {size!r} and hidden_size {values.get('hidden_size')!r}; "
            "onebox runs drafters as wide as their target, whose embeddings and head they use."
        )


def _layer_types(values: _Values, num_layers: int) -> tuple[str, ...]:
    given, forced = values.get("layer_types"), values.flag("use_swa")
    if given is None:
        return _untyped_layers(values, num_layers)
    if not isinstance(given, list) or len(given) != num_layers:
        raise UnsupportedError(
            f"The drafter's config.json: layer_types is {given!r} for {num_layers} layers; it must have one "
            "entry a layer."
        )
    for kind in given:
        if kind not in (SLIDING, FULL):
            raise UnsupportedError(
                f"The drafter's config.json: layer_types holds {kind!r}; it must be {SLIDING} or {FULL}."
            )
    slides = SLIDING in given
    if slides and (values.flag("use_sliding_window") is False or forced is False):
        raise UnsupportedError(
            "The drafter's config.json: layer_types has sliding layers, and use_sliding_window or use_swa is false; "
            "only one can be how it was trained: ask its publisher which."
        )
    return (SLIDING,) * num_layers if forced and not slides else tuple(given)


def _untyped_layers(values: _Values, num_layers: int) -> tuple[str, ...]:
    """Of a config without layer_types: all full, or all sliding by `use_swa`, or by transformers' max_window_layers."""
    if values.flag("use_swa"):
        return (SLIDING,) * num_layers
    if not values.flag("use_sliding_window"):
        return (FULL,) * num_layers
    first = values.get("max_window_layers")
    if not _is_int(first) or first < 0:
        raise UnsupportedError(
            "The drafter's config.json has use_sliding_window and neither layer_types nor max_window_layers: which "
            "layers slide decides the acceptance, and onebox does not guess it; take it from the drafter's publisher."
        )
    return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))


def _window(values: _Values) -> int:
    return values.positive_int("swa_window_size" if values.has("swa_window_size") else "sliding_window")


def _is_causal(values: _Values) -> bool | None:
    """`is_causal` counts before its older name `causal`."""
    given = values.flag("is_causal")
    return values.flag("causal") if given is None else given


def _rms_norm_eps(values: _Values) -> float:
    eps = values.require("rms_norm_eps")
    if not isinstance(eps, float | int) or isinstance(eps, bool) or not 0 < eps < 1:
        raise UnsupportedError(f"The drafter's config.json: rms_norm_eps is {eps!r}; it must be between 0 and 1.")
    return float(eps)


def _rope_theta(values: _Values) -> float:
    """From rope_parameters, rope_scaling or top level; all that are given must agree."""
    found = set()
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UnsupportedError(
                f"The drafter's config.json: {name} is {rope!r}; onebox rotates drafters by rope_type 'default' alone."
            )
        other = [key for key in rope if key not in _ROPE_KEYS]
        if other or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                f"The drafter's config.json: {name}.{other[0] if other else 'partial_rotary_factor'} is not supported; "
                "onebox rotates all dimensions of a drafter's heads."
            )
        found |= {rope["rope_theta"]} if "rope_theta" in rope else set()
    found |= {values.get("rope_theta")} if values.has("rope_theta") else set()
    if len(found) > 1:
        raise UnsupportedError(
            f"The drafter's config.json has several rope_theta ({sorted(found)}); they must be equal."
        )
    theta = found.pop() if found else values.require("rope_theta")
    if not isinstance(theta, float | int) or isinstance(theta, bool) or theta <= 1:
        raise UnsupportedError(f"The drafter's config.json: rope_theta is {theta!r}; it must be a number above 1.")
    return float(theta)


def _taps(values: _Values) -> tuple[int, ...]:
    taps = values.require("target_layer_ids")
    fits = isinstance(taps, list) and taps and all(_is_int(tap) and tap >= 0 for tap in taps)
    if not fits or len(set(taps)) != len(taps):
        raise UnsupportedError(
            f"The drafter's config.json: target_layer_ids is {taps!r}; it must list different layers of the target."
        )
    return tuple(taps)


def _mask_token_id(values: _Values, vocab_size: int) -> int:
    mask = values.require("mask_token_id")
    if not _is_int(mask) or not 0 <= mask < vocab_size:
        raise UnsupportedError(
            f"The drafter's config.json: mask_token_id is {mask!r}; it must be a token below vocab_size {vocab_size:,}."
        )
    return int(mask)


def _block_size(values: _Values) -> int:
    size = values.positive_int("block_size")
    if size < 2:
        raise UnsupportedError("The drafter's config.json: block_size is 1; a block has a token and at least one mask.")
    return size
