"""Published checkpoints, and onebox's own, as data: the format of each module class. A plan then needs no files.

A preset predicts sizes; `onebox inspect` reads them from headers. `tests/planner/test_published.py` compares the
predictions with published sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onebox.spec.conversion import AS_STORED, LoadConversion
from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.traffic import PACKINGS, MatrixPacking, predicted_weight_bytes
from onebox.spec.weights import ExpertFormats, Layout, WeightFormat

__all__ = ["PRESETS", "WRITTEN_PACKINGS", "WeightPreset", "format_name", "named_preset"]

Formats = Mapping[ModuleClass, WeightFormat | ExpertFormats]


@dataclass(frozen=True)
class WeightPreset:
    """A checkpoint's formats by module class; a class that is not listed is BF16."""

    name: str
    summary: str
    formats: Formats
    packings: Mapping[WeightFormat, MatrixPacking] = field(default_factory=lambda: PACKINGS)

    def weight_bytes(self, spec: ModelSpec, conversion: LoadConversion = AS_STORED) -> dict[ModuleClass, int]:
        """Bytes per module class of the whole checkpoint, MTP head and vision tower included.

        With a `conversion`, as it is after loading; raises `UsageError` where a class is quantised otherwise already.
        """
        stored = predicted_weight_bytes(spec, self.formats, self.packings)
        converted = predicted_weight_bytes(spec, conversion.formats, WRITTEN_PACKINGS)
        for kind, wanted in conversion.formats.items():
            held = self.formats.get(kind, WeightFormat.BF16)
            if kind not in stored or held not in (WeightFormat.BF16, wanted):
                what = f"stores its {kind.value} in {held}" if kind in stored else f"has no {kind.value}"
                raise UsageError(f"{conversion.flags[kind]} has nothing to act on: {self.name} {what}.")
            if held is not wanted:
                stored[kind] = converted[kind]
        return stored

    def format_names(self, conversion: LoadConversion = AS_STORED) -> dict[ModuleClass, str]:
        """The format of each class by name, such as int4, after a `conversion` while loading."""
        return {kind: format_name({**self.formats, **conversion.formats}.get(kind, WeightFormat.BF16)) for kind in _C}


def format_name(chosen: WeightFormat | ExpertFormats) -> str:
    """`int4`, or `int3/int4` where gate and up have another format than down."""
    return "/".join(chosen) if isinstance(chosen, ExpertFormats) else chosen.value


def _all(weight_format: WeightFormat, *kinds: ModuleClass) -> dict[ModuleClass, WeightFormat]:
    return dict.fromkeys(kinds, weight_format)


_C = ModuleClass
_INT4, _FP8, _NVFP4 = WeightFormat.INT4, WeightFormat.FP8, WeightFormat.NVFP4
# Qwen's GPTQ files contain the column-to-group table (g_idx), AutoRound's do not.
_GPTQ_WITH_TABLE = MatrixPacking(Layout.GPTQ, 4, group_size=128, scale_dtype="F16", optional=("g_idx",))

# What `onebox build`, and a conversion while loading, write.
WRITTEN_PACKINGS = {
    _INT4: MatrixPacking(Layout.PACKED, 4, group_size=128),
    WeightFormat.INT3: MatrixPacking(Layout.PACKED, 3, group_size=128),
    WeightFormat.INT2: MatrixPacking(Layout.PACKED, 2, group_size=128),
    WeightFormat.INT8: MatrixPacking(Layout.PACKED, 8),
    _FP8: MatrixPacking(Layout.FP8_BLOCK, 8),
}

_AUTOROUND = _all(_INT4, _C.EXPERTS, _C.ATTENTION, _C.DELTA, _C.DELTA_GATES)
_HYBRID_MTP16 = {**_AUTOROUND, _C.SHARED: _FP8, _C.LM_HEAD: WeightFormat.INT8}
_HYBRID = {**_HYBRID_MTP16, _C.MTP_EXPERTS: _INT4, _C.MTP_ATTENTION: _INT4, _C.MTP_SHARED: _FP8}
_FP8_OFFICIAL = _all(
    _FP8, _C.EXPERTS, _C.SHARED, _C.ATTENTION, _C.DELTA, _C.MTP_EXPERTS, _C.MTP_SHARED, _C.MTP_ATTENTION
)

_PRESETS = (
    WeightPreset("bf16", "the official weights", {}),
    WeightPreset("fp8", "official FP8: all projections and experts, MTP's too", _FP8_OFFICIAL),
    WeightPreset("autoround-int4", "Intel AutoRound: experts, attention, DeltaNet INT4", _AUTOROUND),
    WeightPreset(
        "gptq-int4",
        "official GPTQ: routed experts INT4",
        _all(_INT4, _C.EXPERTS),
        {**PACKINGS, _INT4: _GPTQ_WITH_TABLE},
    ),
    WeightPreset("nvfp4", "ModelOpt (nvidia, txn545): routed experts NVFP4", _all(_NVFP4, _C.EXPERTS)),
    # Derived: apart from the tiny DeltaNet gates, no other set of classes is within 0.1 GiB of Sehyo's 75.89.
    WeightPreset(
        "nvfp4-llmc",
        "llm-compressor (Sehyo): experts, shared experts, attention NVFP4",
        _all(_NVFP4, _C.EXPERTS, _C.SHARED, _C.ATTENTION),
    ),
    WeightPreset("hybrid", "AutoRound INT4, FP8 shared experts, INT8 LM head, INT4 MTP head", _HYBRID),
    WeightPreset("hybrid-mtp16", "hybrid as it was published, its MTP head in BF16", _HYBRID_MTP16),
    WeightPreset(
        "hybrid-int34",
        "hybrid with 3-bit experts, their down projections INT4",
        {**_HYBRID, _C.EXPERTS: ExpertFormats(WeightFormat.INT3, _INT4)},
    ),
    WeightPreset("hybrid-int3", "hybrid with 3-bit experts", {**_HYBRID, _C.EXPERTS: WeightFormat.INT3}),
    WeightPreset("hybrid-int2", "hybrid with 2-bit experts", {**_HYBRID, _C.EXPERTS: WeightFormat.INT2}),
)
PRESETS: Mapping[str, WeightPreset] = {preset.name: preset for preset in _PRESETS}


def named_preset(name: str) -> WeightPreset:
    """The preset selected by `--weights`."""
    if name not in PRESETS:
        raise UsageError(f"--weights {name!r} is not known; the known ones are {', '.join(PRESETS)}.")
    return PRESETS[name]
