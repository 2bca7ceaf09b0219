"""Recipes and the choices that follow from them: the source checkpoint and the output format of each module.

A recipe is one target format per module class. `choose` turns it, with the opened sources, into one choice per module,
or raises an error if a target is not possible. No tensor is read here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from onebox.checkpoint.bind import Binding, Bound, bind
from onebox.checkpoint.partial import MTP_CLASSES, narrow
from onebox.checkpoint.source import Checkpoint, join_checkpoints, open_checkpoint
from onebox.spec.errors import MismatchError, UnsupportedError, UsageError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import Module, ModuleClass, modules
from onebox.spec.weights import FP8_BLOCK, INTEGER_BITS, NVFP4_GROUP, Layout, Stored, StoredTensor, WeightFormat

__all__ = [
    "FORMATS",
    "Action",
    "BuildSource",
    "BuildSources",
    "LayerTarget",
    "ModuleChoice",
    "Recipe",
    "TargetFormat",
    "choose",
    "classes_used",
    "open_source",
    "rounded_form",
    "rounded_tensors",
]

GROUP_SIZE = 128


class TargetFormat(StrEnum):
    """The output format of a module class. `keep` is the source's format, bit for bit."""

    KEEP = "keep"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    NVFP4 = "nvfp4"
    AUTO = "auto"
    """Of the MTP layer alone: what is stored in BF16 is quantised as the model's own layers are (`_mtp_target`)."""


FORMATS = tuple(target for target in TargetFormat if target is not TargetFormat.AUTO)
"""The targets of any class."""


class Action(StrEnum):
    """How a module's values are converted."""

    MOVE = "moved"
    """The same bytes, in the same tensors."""
    RELABEL = "relabelled"
    """The same values in another tool's layout: renamed or transposed, never rounded."""
    RESCALE = "rescaled"
    """The same codes with NVFP4's global scale inverted, which rounds one float32 value per weight."""
    QUANTIZE = "quantised"
    """Rounded to nearest."""
    CALIBRATE = "calibrated"
    """Rounded by a calibration (`onebox quantize`)."""
    LIST = "listed"
    """Token ids, not values: the draft vocabulary."""


_TILED = (TargetFormat.INT4, TargetFormat.INT3, TargetFormat.INT2)
"""The formats of experts that one kernel reads, in which gate and up may differ from down."""
_FEW_BITS = (TargetFormat.INT3, TargetFormat.INT2)
_COLUMNS_PER_GROUP = {**dict.fromkeys(_TILED, GROUP_SIZE), TargetFormat.NVFP4: NVFP4_GROUP}
"""Columns per scale of the targets of at most four bits."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class LayerTarget(NamedTuple):
    """The target of the routed experts of some layers."""

    layers: tuple[int, ...]
    target: TargetFormat

    def __str__(self) -> str:
        return f"{','.join(map(str, self.layers))}={self.target.value}"


@dataclass(frozen=True)
class Recipe:
    """The target format of each group of module classes that the user can set."""

    experts: TargetFormat = TargetFormat.KEEP
    attention: TargetFormat = TargetFormat.KEEP
    delta: TargetFormat = TargetFormat.KEEP
    shared: TargetFormat = TargetFormat.KEEP
    mtp: TargetFormat = TargetFormat.KEEP
    lm_head: TargetFormat = TargetFormat.KEEP
    experts_down: TargetFormat | None = None
    """Of the routed experts' down projections; None: as their gate and up projections."""
    expert_layers: tuple[LayerTarget, ...] = ()
    """Of the routed experts of single layers, whatever the others have; the first that names a layer counts."""

    def __post_init__(self) -> None:
        for name, target in self.targets.items():
            if target in _FEW_BITS and not name.startswith("experts"):
                raise UsageError(
                    f"--{name.replace('_', '-')} {target}: {target.value.upper()} is a format of routed experts "
                    "(--experts, --experts-down, --expert-layers); use int4."
                )
        if self.experts_down and not {self.experts, self.experts_down} <= set(_TILED):
            raise UsageError(
                f"--experts-down {self.experts_down} beside --experts {self.experts}: down projections can have "
                f"another format than gate and up only among {', '.join(_TILED)}, which one kernel reads."
            )

    @property
    def targets(self) -> dict[str, TargetFormat]:
        """The targets that are set for whole classes, by field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, TargetFormat)}

    @property
    def texts(self) -> dict[str, str]:
        """What is set, by field, as manifests and digests have it."""
        texts = {name: target.value for name, target in self.targets.items()}
        if self.expert_layers:
            texts["expert_layers"] = " ".join(str(each) for each in self.expert_layers)
        return texts

    @classmethod
    def completed(cls, given: Mapping[str, Any], *, has_fp8: bool) -> "Recipe":
        """The given targets and the defaults: DeltaNet as attention, FP8 shared experts if there is FP8, MTP auto."""
        shared = TargetFormat.FP8 if has_fp8 else TargetFormat.KEEP
        delta = given.get("attention", TargetFormat.KEEP)
        return cls(**{"shared": shared, "delta": delta, "mtp": TargetFormat.AUTO, **given})

    def target_of(self, module: Module) -> TargetFormat:
        """The target of one module. Routers, norms, gates, mtp.fc, embedding and vision always keep their format."""
        field = _FIELD_OF.get(module.module_class)
        if module.module_class is ModuleClass.EXPERTS:
            return self._expert_target(module.name)
        target: TargetFormat = getattr(self, field) if field and module.is_matrix else TargetFormat.KEEP
        return target

    def _expert_target(self, name: str) -> TargetFormat:
        layer = _layer_of(name)
        own = next((each.target for each in self.expert_layers if layer in each.layers), None)
        if own is None and name.endswith(".down_proj"):
            own = self.experts_down
        return own or self.experts


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    return int(found.group(1)) if found else -1


_FIELD_OF = {
    ModuleClass.EXPERTS: "experts",
    ModuleClass.ATTENTION: "attention",
    ModuleClass.DELTA: "delta",
    ModuleClass.SHARED: "shared",
    ModuleClass.LM_HEAD: "lm_head",
    ModuleClass.MTP_EXPERTS: "mtp",
    ModuleClass.MTP_SHARED: "mtp",
    ModuleClass.MTP_ATTENTION: "mtp",
}


class BuildSource(NamedTuple):
    """An opened and bound checkpoint to take modules from."""

    role: str
    checkpoint: Checkpoint
    binding: Binding


@dataclass(frozen=True)
class BuildSources:
    """The base and, if given, the official FP8 checkpoint and the source of the MTP head."""

    base: BuildSource
    fp8: BuildSource | None = None
    mtp: BuildSource | None = None

    def all(self) -> list[BuildSource]:
        return [source for source in (self.base, self.fp8, self.mtp) if source]


@dataclass(frozen=True)
class ModuleChoice:
    """One module of the output: its source, its output format and the conversion."""

    module: Module
    source: BuildSource
    bound: Bound
    target: Stored
    action: Action


def classes_used(recipe: Recipe, role: str, *, has_fp8: bool = True, has_mtp_source: bool) -> frozenset[ModuleClass]:
    """The module classes that a build takes from the source in `role`: "base", "fp8" or "mtp"."""
    if role == "mtp":
        return MTP_CLASSES
    fields = [name for name, target in recipe.targets.items() if target is TargetFormat.FP8]
    fp8 = {kind for name in fields for kind in _classes_of(name)} - (MTP_CLASSES if has_mtp_source else frozenset())
    if role == "fp8":
        return frozenset(fp8)
    return frozenset(ModuleClass) - (fp8 if has_fp8 else set()) - (MTP_CLASSES if has_mtp_source else frozenset())


def open_source(
    role: str, directory: Path, uses: frozenset[ModuleClass] | None = None, others: Sequence[Path] = ()
) -> BuildSource:
    """Opens a checkpoint as a build source. Raises `MismatchError` with the first fatal problem, if any.

    With `uses`, modules of other classes may be absent. `others` are directories with more tensors of the checkpoint.
    """
    checkpoint = join_checkpoints(open_checkpoint(directory), [open_checkpoint(other) for other in others])
    binding = bind(checkpoint)
    if uses is not None:
        checkpoint, binding = narrow(checkpoint, binding, uses)
    fatal = [problem for problem in binding.problems if problem.is_fatal]
    if fatal:
        more = f" ({len(fatal)} problems in all: run `onebox inspect {directory}`)" if len(fatal) > 1 else ""
        raise MismatchError(f"The {role} checkpoint {directory} is not complete: {fatal[0].message}{more}")
    return BuildSource(role, checkpoint, binding)


def choose(recipe: Recipe, sources: BuildSources) -> list[ModuleChoice]:
    """One choice per module of the output, in the model's order; modules that no source contains are left out."""
    choices = list(_choices(recipe, sources))
    _refuse_idle_targets(recipe, choices)
    return choices


def _refuse_idle_targets(recipe: Recipe, choices: list[ModuleChoice]) -> None:
    """Rejects a target that applies to no module of the output, which would otherwise be ignored silently."""
    used = {_FIELD_OF.get(choice.module.module_class) for choice in choices}
    for name, target in recipe.targets.items():
        if target not in (TargetFormat.KEEP, TargetFormat.AUTO) and name.removesuffix("_down") not in used:
            raise UsageError(
                f"--{name.replace('_', '-')} {target} has nothing to act on: no source holds such modules; "
                "leave it out or name a source that does."
            )
    held = {_layer_of(choice.module.name) for choice in choices if choice.module.module_class is ModuleClass.EXPERTS}
    for layers, target in recipe.expert_layers:
        unknown = [layer for layer in layers if layer not in held]
        if unknown:
            raise UsageError(
                f"--expert-layers names layer {unknown[0]} for {target}, but the model has routed experts in layers "
                f"{min(held, default=0)} to {max(held, default=0)}."
            )


def _choices(recipe: Recipe, sources: BuildSources) -> Iterator[ModuleChoice]:
    wanted = list(modules(_richest_spec(sources)))
    origins = _origins(recipe, sources, wanted)
    body: dict[ModuleClass, WeightFormat] = {}
    for module in wanted:
        source = origins[module.module_class]
        bound = source.binding.modules.get(module.name)
        if bound is not None:
            target = recipe.target_of(module)
            # The MTP layer's modules come after the body's.
            target = _mtp_target(bound, body) if target is TargetFormat.AUTO else target
            choice = _choose_one(target, module, source, bound)
            if module.is_matrix:
                body.setdefault(module.module_class, choice.target.format)
            yield choice


_BODY_OF = {
    ModuleClass.MTP_EXPERTS: ModuleClass.EXPERTS,
    ModuleClass.MTP_SHARED: ModuleClass.SHARED,
    ModuleClass.MTP_ATTENTION: ModuleClass.ATTENTION,
}
_PLAIN = (WeightFormat.BF16, WeightFormat.FP16, WeightFormat.FP32)
_FOUR_BITS = {WeightFormat.INT4: TargetFormat.INT4, WeightFormat.NVFP4: TargetFormat.NVFP4}


def _mtp_target(bound: Bound, body: Mapping[ModuleClass, WeightFormat]) -> TargetFormat:
    """The target of one matrix of the MTP layer, from the formats of the body's classes.

    Experts are INT4, or FP8 or NVFP4 where the body's are; attention and the shared expert have the body's four-bit
    format or FP8. What is quantised already is kept, and so is the head of a body whose experts are not quantised.
    """
    experts = body.get(ModuleClass.EXPERTS, WeightFormat.BF16)
    if experts in _PLAIN or not bound.is_plain:
        return TargetFormat.KEEP
    own = body.get(_BODY_OF[bound.module.module_class], WeightFormat.BF16)
    if bound.module.module_class is ModuleClass.MTP_EXPERTS:
        target = TargetFormat.FP8 if own is WeightFormat.FP8 else _FOUR_BITS.get(own, TargetFormat.INT4)
    else:
        target = _FOUR_BITS.get(own, TargetFormat.FP8)
    is_whole = bound.module.shape[1] % _COLUMNS_PER_GROUP.get(target, 1) == 0
    return target if is_whole else TargetFormat.FP8


def _origins(recipe: Recipe, sources: BuildSources, wanted: list[Module]) -> dict[ModuleClass, BuildSource]:
    """The source of each class: one for all its modules, and one for the whole MTP head.

    A class that becomes FP8 comes from the FP8 checkpoint if that holds it in FP8 and its own source does not. A head
    that --mtp-from names is never exchanged.
    """
    origins = {kind: sources.mtp if sources.mtp and kind.in_mtp else sources.base for kind in ModuleClass}
    for name, target in recipe.targets.items():
        if target is not TargetFormat.FP8 or sources.fp8 is None or (name == "mtp" and sources.mtp):
            continue
        kinds = _classes_of(name)
        asked = [module.name for module in wanted if module.module_class in kinds]
        names = [each for each in asked if each in sources.base.binding.modules]
        # A base of which only the classes that it gives were fetched has none of the others.
        is_absent = not names and any(each in sources.fp8.binding.modules for each in asked)
        if is_absent or _is_from_fp8(name, names, sources.base, sources.fp8):
            origins |= dict.fromkeys(kinds, sources.fp8)
    return origins


def _classes_of(field: str) -> set[ModuleClass]:
    """The classes that one source gives for a field of the recipe: for the MTP layer, the whole head."""
    if field == "mtp":
        return set(MTP_CLASSES)
    return {kind for kind, name in _FIELD_OF.items() if name == field}


def _is_from_fp8(field: str, names: list[str], own: BuildSource, fp8: BuildSource) -> bool:
    """Whether the modules `names` of `own`, which become FP8, come from the FP8 checkpoint; all of them or none."""
    held = [fp8.binding.modules[name] for name in names if name in fp8.binding.modules]
    to_convert = [own.binding.modules[name] for name in names if _FIELD_OF.get(_class_of(own, name)) == field]
    if all(bound.stored.format is WeightFormat.FP8 for bound in to_convert):
        return False
    if not any(bound.stored.format is WeightFormat.FP8 for bound in held):
        return False
    if len(held) < len(names):
        missing = next(name for name in names if name not in fp8.binding.modules)
        raise MismatchError(
            f"--{field.replace('_', '-')} fp8 would mix the base {own.checkpoint.directory} and the fp8 checkpoint "
            f"{fp8.checkpoint.directory}, which has no {missing}: such modules come from one source; complete the fp8 "
            "checkpoint, or leave it out."
        )
    return True


def _class_of(source: BuildSource, name: str) -> ModuleClass:
    return source.binding.modules[name].module.module_class


def _richest_spec(sources: BuildSources) -> ModelSpec:
    """The base's spec, or that of the MTP source if the base's config has no MTP head."""
    base = sources.base.checkpoint.spec
    mtp = sources.mtp.checkpoint.spec if sources.mtp else base
    return base if base.mtp_num_hidden_layers else mtp


def _choose_one(target: TargetFormat, module: Module, source: BuildSource, bound: Bound) -> ModuleChoice:
    is_kept = target is TargetFormat.KEEP or bound.stored.format.value == target.value
    if is_kept or (target is TargetFormat.BF16 and bound.is_plain):
        return ModuleChoice(module, source, bound, bound.stored, Action.MOVE)
    return ModuleChoice(module, source, bound, rounded_form(target, bound), Action.QUANTIZE)


def rounded_form(target: TargetFormat, bound: Bound) -> Stored:
    """The format of `bound` after rounding to `target`. Rejects conversions that cannot restore the lost precision."""
    module = bound.module
    is_eight_bit = bound.stored.format is WeightFormat.FP8 or bound.stored.layout is Layout.INT8_ROW
    if target is TargetFormat.BF16 or not (bound.is_plain or (is_eight_bit and target in _COLUMNS_PER_GROUP)):
        official = " or name the official FP8 checkpoint with --fp8" if target is TargetFormat.FP8 else ""
        raise UnsupportedError(
            f"{module.name} is stored as {bound.stored} and cannot become {target.value}: take it from a source that "
            f"stores it in BF16{official}."
        )
    columns, group = module.shape[1], _COLUMNS_PER_GROUP.get(target, 1)
    if columns % group:
        raise UnsupportedError(
            f"{module.name} has rows of {columns} values, not a multiple of {target.value.upper()}'s group of {group}: "
            "keep it."
        )
    return {
        TargetFormat.FP8: Stored(WeightFormat.FP8, Layout.FP8_BLOCK),
        TargetFormat.INT8: Stored(WeightFormat.INT8, Layout.PACKED),
        TargetFormat.INT4: Stored(WeightFormat.INT4, Layout.PACKED, GROUP_SIZE),
        TargetFormat.INT3: Stored(WeightFormat.INT3, Layout.PACKED, GROUP_SIZE),
        TargetFormat.INT2: Stored(WeightFormat.INT2, Layout.PACKED, GROUP_SIZE),
        TargetFormat.NVFP4: Stored(WeightFormat.NVFP4, Layout.NVFP4_DIVIDES, NVFP4_GROUP),
    }[target]


def rounded_tensors(target: Stored, rows: int, columns: int) -> dict[str, StoredTensor]:
    """The tensors of a quantised matrix by suffix, codes first, then scales."""
    scale = "BF16"  # `rounding.py` has the reason
    if target.format is WeightFormat.FP8:
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return {"weight": StoredTensor("F8_E4M3", (rows, columns)), "weight_scale": StoredTensor(scale, blocks)}
    if target.format is WeightFormat.NVFP4:
        return {
            "weight_packed": StoredTensor("U8", (rows, columns // 2)),
            "weight_scale": StoredTensor("F8_E4M3", (rows, columns // NVFP4_GROUP)),
            "weight_global_scale": StoredTensor("F32", (1,)),
        }
    return {
        "weight_packed": StoredTensor("I32", (rows, -(-columns * INTEGER_BITS[target.format] // 32))),
        "weight_scale": StoredTensor(scale, (rows, -(-columns // (target.group_size or columns)))),
        "weight_shape": StoredTensor("I64", (2,)),
    }
