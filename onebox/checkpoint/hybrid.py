"""`_hybrid_quant_info`: the note that albond's script build-hybrid-checkpoint leaves in config.json.

The script puts matrices of the official FP8 checkpoint, with their `weight_scale_inv`, in the place of BF16 ones of an
INT4 checkpoint (AutoRound or GPTQ). It leaves quantization_config as it was, which says nothing of FP8, and describes
the result in sentences that are the same for every checkpoint:

    "_hybrid_quant_info": {"moe_experts": "GPTQ INT4 (group_size=128, sym=True, Marlin kernels)",
                           "dense_layers": "FP8 E4M3 block-128 (from official ..., calibrated scales)", ...}

Formats are read from the tensors, as always; here the sentences are held against them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onebox.spec.modules import ModuleClass
from onebox.spec.weights import FP8_BLOCK, Layout, WeightFormat

if TYPE_CHECKING:
    from onebox.checkpoint.bind import Bound

__all__ = ["HYBRID_KEY", "hybrid_contradictions", "hybrid_notes"]

HYBRID_KEY = "_hybrid_quant_info"
_EXPERTS_KEY, _DENSE_KEY = "moe_experts", "dense_layers"
_KNOWN = {
    _EXPERTS_KEY,
    _DENSE_KEY,
    "description",
    "norms_gates_embeddings",
    "source_gptq",
    "source_fp8",
    "vllm_patch",
    "target_hardware",
    "converter",
}
_BLOCKS = (Layout.FP8_BLOCK, Layout.FP8_BLOCK_INV)
_FIX = "take the config.json that was written with these files, or remove the key"


def hybrid_contradictions(config: Mapping[str, Any], modules: Mapping[str, "Bound"]) -> Iterator[str]:
    """Sentences on what the note says and the tensors, or quantization_config, deny."""
    info = config.get(HYBRID_KEY)
    if info is None:
        return
    if not isinstance(info, Mapping):
        yield f"config.json: {HYBRID_KEY} is {info!r} where an object is expected: {_FIX}."
        return
    yield from _expert_contradictions(str(info.get(_EXPERTS_KEY, "")), config, modules)
    yield from _dense_contradictions(str(info.get(_DENSE_KEY, "")), modules)


def hybrid_notes(config: Mapping[str, Any], modules: Mapping[str, "Bound"]) -> Iterator[str]:
    """Sentences on what the note leaves unsaid, or says and cannot be checked."""
    info = config.get(HYBRID_KEY)
    if not isinstance(info, Mapping):
        return
    count = sum(bound.stored.format is WeightFormat.FP8 for bound in modules.values())
    yield (
        f"quantization_config does not describe the {count:,} FP8 matrices of this hybrid: onebox reads them, other "
        "tools take them for unscaled weights; `onebox build --base DIR --out NEW` writes a description of all."
    )
    for key in info:
        if key not in _KNOWN:
            yield f"config.json: {HYBRID_KEY}.{key} is not checked: formats are read from the tensors."
    for key, word in ((_EXPERTS_KEY, "INT4"), (_DENSE_KEY, "FP8")):
        if word not in str(info.get(key, "")):
            yield f"config.json: {HYBRID_KEY}.{key} names no format that onebox can check ({word} is usual)."


def _expert_contradictions(said: str, config: Mapping[str, Any], modules: Mapping[str, "Bound"]) -> Iterator[str]:
    """Bits, group size and symmetry of the routed experts."""
    bits, size = _number(r"\bINT(\d)\b", said), _number(r"group_size=(\d+)", said)
    if bits is None:
        return
    wanted = f"{HYBRID_KEY}.{_EXPERTS_KEY} says INT{bits}" + (f" in groups of {size}" if size else "")
    for name, bound in modules.items():
        if bound.module.module_class is not ModuleClass.EXPERTS:
            continue
        stored = bound.stored
        if stored.format.value != f"int{bits}" or (size and stored.group_size != size):
            yield f"config.json: {wanted}, but {name} is stored as {stored}: {_FIX}."
            break
    described = config.get("quantization_config")
    own = described if isinstance(described, Mapping) else {}
    symmetric = re.search(r"\bsym=(True|False)\b", said)
    values = {"bits": bits, "group_size": size, "sym": symmetric and symmetric.group(1) == "True"}
    for key, value in values.items():
        if value is not None and own.get(key, value) != value:
            yield f"config.json: {wanted} and {key} {value}, but quantization_config has {key} {own[key]}: {_FIX}."


def _dense_contradictions(said: str, modules: Mapping[str, "Bound"]) -> Iterator[str]:
    """FP8 in blocks among the matrices that are no experts."""
    if "FP8" not in said:
        return
    block = _number(r"block-(\d+)", said)
    if block is not None and block != FP8_BLOCK:
        yield f"config.json: {HYBRID_KEY}.{_DENSE_KEY} says blocks of {block}; onebox reads blocks of {FP8_BLOCK}."
    dense = {ModuleClass.SHARED, ModuleClass.ATTENTION, ModuleClass.DELTA}
    found = [bound for bound in modules.values() if bound.module.module_class in dense]
    fp8 = [bound for bound in found if bound.stored.format is WeightFormat.FP8]
    if found and not fp8:
        yield (
            f"config.json: {HYBRID_KEY}.{_DENSE_KEY} says FP8, but no shared expert, attention or DeltaNet matrix is "
            f"stored in FP8: {_FIX}."
        )
    other = next((bound for bound in fp8 if bound.stored.layout not in _BLOCKS), None)
    if other and block is not None:
        yield (
            f"config.json: {HYBRID_KEY}.{_DENSE_KEY} says FP8 in blocks, but {other.module.name} is stored as "
            f"{other.stored}: {_FIX}."
        )


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None
