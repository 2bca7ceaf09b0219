"""Writes the output's `quantization_config` in compressed-tensors' form, so that stock tools can load it.

If all quantised modules stay as the base stores them, the base's quantization_config is copied. Otherwise every module
that is not requantised is converted to compressed-tensors' layout and described here, one config group per format.
"""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from onebox.checkpoint.hybrid import HYBRID_KEY
from onebox.checkpoint.recipe import Action, BuildSource, ModuleChoice
from onebox.spec.errors import UnsupportedError
from onebox.spec.modules import ModuleClass
from onebox.spec.weights import FP8_BLOCK, INTEGER_BITS, Layout, Stored, WeightFormat

__all__ = ["describe", "is_native", "settle", "weight_scheme"]

_PATTERNS = {
    ModuleClass.ATTENTION: r"layers\.\d+\.self_attn\.(q|k|v|o)_proj",
    ModuleClass.DELTA: r"layers\.\d+\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)",
    ModuleClass.DELTA_GATES: r"layers\.\d+\.linear_attn\.in_proj_(a|b)",
    ModuleClass.EXPERTS: r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    ModuleClass.SHARED: r"layers\.\d+\.mlp\.shared_expert\.(gate|up|down)_proj",
    ModuleClass.MTP_ATTENTION: r"layers\.\d+\.self_attn\.(q|k|v|o)_proj",
    ModuleClass.MTP_EXPERTS: r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    ModuleClass.MTP_SHARED: r"layers\.\d+\.mlp\.shared_expert\.(gate|up|down)_proj",
    ModuleClass.MTP_FC: r"fc",
}
# Linear layers that no recipe quantises. vLLM requires each linear to be in a group or in this list.
_ALWAYS_PLAIN = [r"re:.*mlp\.gate$", r"re:.*mlp\.shared_expert_gate$", "re:.*visual.*"]


def is_native(choices: list[ModuleChoice], base: BuildSource) -> bool:
    """Whether every quantised module stays as the base stores it, so that the base's description is still valid.

    A hybrid whose FP8 matrices its quantization_config does not mention has none that is.
    """
    return HYBRID_KEY not in base.checkpoint.config and all(
        choice.action is Action.MOVE and (choice.source is base or choice.bound.is_plain) for choice in choices
    )


def settle(choices: list[ModuleChoice], *, native: bool) -> list[ModuleChoice]:
    """The choices with their final formats: unless native, moved modules get compressed-tensors' layout."""
    return choices if native else [_relabelled(choice) for choice in choices]


def _relabelled(choice: ModuleChoice) -> ModuleChoice:
    stored = choice.target
    if choice.action is not Action.MOVE:
        return choice
    if stored.layout is Layout.GPTQ:
        config = choice.source.checkpoint.quantization_config or {}
        # Headers do not show whether all zero points are the middle; unless the config sets sym, assume they are not.
        target = replace(stored, layout=Layout.PACKED, has_zero_points=config.get("sym") is not True)
        return replace(choice, target=target)
    if stored.layout is Layout.FP8_BLOCK_INV:
        return replace(choice, target=replace(stored, layout=Layout.FP8_BLOCK))
    if stored.layout is Layout.NVFP4_MULTIPLIES:
        return replace(choice, target=replace(stored, layout=Layout.NVFP4_DIVIDES))
    if stored.layout is Layout.INT8_ROW:
        # vLLM reads integers without quantised inputs as pack-quantized alone.
        return replace(choice, target=replace(stored, layout=Layout.PACKED))
    return choice


def describe(choices: list[ModuleChoice], base: BuildSource, *, native: bool) -> dict[str, Any] | None:
    """The output's quantization_config, or None if nothing is quantised."""
    has_mtp_graft = any(choice.module.module_class.in_mtp and choice.source is not base for choice in choices)
    if native:
        own = base.checkpoint.quantization_config
        return _excluding_mtp(own) if own and has_mtp_graft else own
    groups: dict[_Way, list[ModuleChoice]] = {}
    for choice in choices:
        if choice.target.layout is not Layout.PLAIN:
            groups.setdefault(_way(choice), []).append(choice)
    # transformers takes the experts' scheme from the first group whose targets mention experts: put that group first.
    ordered = sorted(groups.items(), key=lambda item: ModuleClass.EXPERTS not in _classes(item[1]))
    schemes = {
        f"group_{number}": {"targets": _targets(members, choices), **weight_scheme(*way)}
        for number, (way, members) in enumerate(ordered)
    }
    formats = {scheme["format"] for scheme in schemes.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": _ignored(choices),
    }


_Way = tuple[Stored, bool]
"""The format of a module, and whether an input scale is stored with it: equal for all modules of a config group."""


def _way(choice: ModuleChoice) -> _Way:
    is_kept = choice.action is not Action.QUANTIZE
    return choice.target, is_kept and "input_global_scale" in choice.bound.tensors


def _classes(members: list[ModuleChoice]) -> set[ModuleClass]:
    return {choice.module.module_class for choice in members}


def _pattern(module_class: ModuleClass) -> str:
    """A target for all modules of a class. The negative look-ahead excludes the MTP layer from main-model patterns."""
    if module_class is ModuleClass.LM_HEAD:
        return r"re:.*lm_head$"
    prefix = r"^mtp\." if module_class.in_mtp else r"^(?!mtp\.).*"
    return f"re:{prefix}{_PATTERNS[module_class]}$"


def _targets(members: list[ModuleChoice], choices: list[ModuleChoice]) -> list[str]:
    """One pattern per class if all its modules have one format; experts by layer and part; else modules by name."""
    targets = []
    for module_class in sorted(_classes(members)):
        alike = [choice for choice in choices if choice.module.module_class is module_class]
        own = [choice for choice in members if choice.module.module_class is module_class]
        if len({_way(choice) for choice in alike}) == 1:
            targets.append(_pattern(module_class))
        elif module_class is ModuleClass.EXPERTS:
            targets += _expert_targets(own, alike)
        else:
            targets += [choice.module.name for choice in own]
    return targets


_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj$")


def _expert_targets(members: list[ModuleChoice], all_experts: list[ModuleChoice]) -> list[str]:
    """Patterns of whole layers' gate, up or down projections, and by name those of layers that are not alike."""
    count: Counter[tuple[str, ...]] = Counter(_layer_and_part(choice) for choice in all_experts)
    found: Counter[tuple[str, ...]] = Counter(_layer_and_part(choice) for choice in members)
    layers_of: dict[str, list[str]] = {}
    for layer, part in (key for key in found if found[key] == count[key]):
        layers_of.setdefault(part, []).append(layer)
    parts_of: dict[tuple[str, ...], list[str]] = {}
    for part, layers in layers_of.items():
        parts_of.setdefault(tuple(sorted(layers, key=int)), []).append(part)
    num_layers = len({layer for layer, _ in count})
    patterns = [
        rf"re:^(?!mtp\.).*layers\.{_any_of(layers, num_layers)}\.mlp\.experts\.\d+\.({'|'.join(parts)})_proj$"
        for layers, parts in parts_of.items()
    ]
    single = [choice for choice in members if found[_layer_and_part(choice)] < count[_layer_and_part(choice)]]
    return patterns + [choice.module.name for choice in single]


def _layer_and_part(choice: ModuleChoice) -> tuple[str, ...]:
    found = _EXPERT.search(choice.module.name)
    return found.groups() if found else ("", "")


def _any_of(layers: tuple[str, ...], num_layers: int) -> str:
    return r"\d+" if len(layers) == num_layers else f"({'|'.join(layers)})"


def _ignored(choices: list[ModuleChoice]) -> list[str]:
    """Every linear that is not quantised. Modules of a partly quantised class are listed by name."""
    plain = [choice for choice in choices if choice.target.layout is Layout.PLAIN and choice.module.is_matrix]
    mtp = [choice for choice in choices if choice.module.module_class.in_mtp and choice.module.is_matrix]
    ignored = list(_ALWAYS_PLAIN)
    if mtp and all(choice.target.layout is Layout.PLAIN for choice in mtp):
        ignored.append(r"re:^mtp\..*")
        plain = [choice for choice in plain if not choice.module.module_class.in_mtp]
    named = [choice for choice in plain if choice.module.module_class is not ModuleClass.EMBEDDING]
    return ignored + _targets(named, choices)


def weight_scheme(stored: Stored, has_inputs: bool = False) -> dict[str, Any]:
    """The config group of weights stored so; `has_inputs`: with scales of their inputs."""
    if stored.format is WeightFormat.NVFP4:
        return _nvfp4_scheme(has_inputs)
    if stored.layout is Layout.PACKED:
        bits = INTEGER_BITS[stored.format]
        # One scale per row is what compressed-tensors calls a channel.
        size = {"strategy": "group", "group_size": stored.group_size} if stored.group_size else {"strategy": "channel"}
        weights = {"num_bits": bits, "type": "int", "symmetric": not stored.has_zero_points, "dynamic": False, **size}
        return {"format": "pack-quantized", "weights": weights, "input_activations": None}
    return _fp8_scheme(stored)


def _fp8_scheme(stored: Stored) -> dict[str, Any]:
    """FP8 weights. Other tools quantise activations per token, as in the official FP8 checkpoint; onebox does not."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = {**common, "dynamic": False}
    inputs: dict[str, Any] = {**common, "dynamic": True, "strategy": "token"}
    if stored.layout is Layout.FP8_BLOCK:
        weights |= {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
        inputs |= {"strategy": "group", "group_size": FP8_BLOCK}
    else:
        weights["strategy"] = "channel" if stored.layout is Layout.FP8_ROW else "tensor"
    return {"format": "float-quantized", "weights": weights, "input_activations": inputs}


def _nvfp4_scheme(has_inputs: bool) -> dict[str, Any]:
    """NVFP4 weights; activations are described only if the base stores the scales needed to quantise them."""
    common = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    inputs = {**common, "dynamic": "local"} if has_inputs else None
    return {
        "format": "nvfp4-pack-quantized",
        "weights": {**common, "dynamic": False},
        "input_activations": inputs,
    }


def _excluding_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """The base's quantization_config with the grafted MTP head excluded from quantisation."""
    method = config.get("quant_method")
    if method in ("auto-round", "inc"):
        return config  # quantises only block_name_to_quantize, which is the main layers
    if method == "gptq":
        rules = config.get("dynamic") or {}
        known = any(re.search("mtp", rule) for rule in rules)
        return config if known else {**config, "dynamic": {**rules, "-:.*mtp.*": {}}}
    lists = {"fp8": ("modules_to_not_convert", "mtp"), "compressed-tensors": ("ignore", r"re:^mtp\..*")}
    lists["modelopt"] = ("ignore", "mtp*")
    if method not in lists:
        raise UnsupportedError(
            f"The base's quantization_config has quant_method {method!r}, which onebox cannot extend by an MTP head."
        )
    key, entry = lists[str(method)]
    names = list(config.get(key) or [])
    return config if entry in names else {**config, key: [*names, entry]}
