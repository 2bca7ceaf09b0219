"""Whether stock vLLM loads a checkpoint on N ranks, and how: from the headers and config.json, before a byte is copied.

vLLM's loader leaves a weight that it has no name for unset without a word, and a scheme that matches nothing falls back
to BF16. So every layer that vLLM makes is looked up here as vLLM does, and held against what the files store.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onebox.checkpoint.bind import Binding, Bound
from onebox.checkpoint.source import Checkpoint
from onebox.planner.memory import checkpoint_bytes
from onebox.scaleout.layers import RENAMED, RENAMED_TEXT_ONLY, Split, VllmLayer, vllm_layers
from onebox.scaleout.ranks import class_bytes_per_rank, rank_spec, split_problems, stage_specs
from onebox.scaleout.schemes import Kernel, kernel_of, needed_features
from onebox.scaleout.targets import QuantizationTargets, Resolution, Scheme
from onebox.scaleout.versions import (
    BLOCK_DRAFTERS,
    FAMILY,
    METHODS,
    MIXED_WINDOW_DFLASH,
    MULTI_NODE,
    READ_VERSION,
    Feature,
    VllmVersion,
    lowest_version,
)
from onebox.spec.draft_vocab import D2T_TENSOR
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.weights import Layout, Stored, WeightFormat

__all__ = ["CheckRequest", "CheckedLayer", "Finding", "VllmCheck", "check_checkpoint"]

_BLOCK_METHODS = ("dflash", "eagle", "eagle3", "dspark", "extract_hidden_states")
"""Drafters that vLLM refuses with pipelines."""
_NUMBERS = {
    WeightFormat.FP8: (8, "float"),
    WeightFormat.INT8: (8, "int"),
    WeightFormat.INT4: (4, "int"),
    WeightFormat.INT3: (3, "int"),
    WeightFormat.INT2: (2, "int"),
    WeightFormat.NVFP4: (4, "float"),
}
_READ_LAYOUTS = (Layout.PACKED, Layout.FP8_BLOCK, Layout.FP8_ROW, Layout.FP8_TENSOR, Layout.NVFP4_DIVIDES)
"""Tensors that vLLM's compressed-tensors classes have by these names."""


@dataclass(frozen=True)
class CheckRequest:
    """How the checkpoint would be served."""

    tp: int = 1
    pp: int = 1
    vllm: VllmVersion | None = None
    drafter: str | None = None
    """The method of vLLM's --speculative-config; None: no drafts."""


@dataclass(frozen=True)
class Finding:
    """One sentence; fatal: vLLM refuses the checkpoint, or reads it wrongly."""

    text: str
    is_fatal: bool = True


@dataclass(frozen=True)
class CheckedLayer:
    """One of vLLM's layers: its scheme and kernel, and what is wrong with it."""

    layer: VllmLayer
    resolution: Resolution
    kernel: Kernel
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class VllmCheck:
    """Everything that `onebox scaleout check` reports."""

    request: CheckRequest
    spec: ModelSpec
    layers: tuple[CheckedLayer, ...]
    findings: tuple[Finding, ...]
    features: tuple[Feature, ...]
    rank_bytes: Mapping[ModuleClass, int] = field(default_factory=dict)
    """Of the rank that holds most."""
    token_bytes: int = 0
    """KV of a token of context in BF16, on that rank."""
    state_bytes: int = 0
    """Of a sequence's DeltaNet layers, on that rank."""

    @property
    def loads(self) -> bool:
        return not any(finding.is_fatal for finding in self.findings)

    @property
    def is_followed(self) -> bool:
        """Whether the layers were looked up: not those of other methods than compressed-tensors."""
        return bool(self.layers)

    @property
    def lowest_version(self) -> VllmVersion:
        return lowest_version(self.features)


def check_checkpoint(checkpoint: Checkpoint, binding: Binding, request: CheckRequest) -> VllmCheck:
    """Looks up every layer. `binding` is the checkpoint's own, with its problems."""
    spec = checkpoint.spec
    stage = rank_spec(_largest_stage(spec, request.pp), request.tp)  # refuses what does not divide
    config = checkpoint.quantization_config
    layers = _checked_layers(spec, binding, config, request)
    features = _features(layers, request)
    findings = [
        *(Finding(problem.message, problem.is_fatal) for problem in binding.problems if problem.is_fatal),
        *_config_findings(checkpoint, config),
        *_layer_findings(layers),
        *_drafter_findings(checkpoint, binding, request),
        *_method_findings(request),
        *_version_findings(features, request.vllm),
    ]
    return VllmCheck(
        request,
        spec,
        layers,
        tuple(findings),
        features,
        _largest_rank(spec, binding, request),
        token_bytes=KVFormat.parse("bf16").bytes_per_token(stage, with_mtp=request.drafter == "mtp"),
        state_bytes=checkpoint_bytes(stage),
    )


def _targets(config: Mapping[str, Any] | None, renamed: Mapping[str, str | None]) -> QuantizationTargets:
    """None of another method than compressed-tensors, whose names vLLM reads otherwise."""
    described = config if config and config.get("quant_method") == "compressed-tensors" else {}
    return QuantizationTargets(described, renamed)


def _checked_layers(
    spec: ModelSpec, binding: Binding, config: Mapping[str, Any] | None, request: CheckRequest
) -> tuple[CheckedLayer, ...]:
    is_readable = config is None or config.get("quant_method") == "compressed-tensors"
    if not is_readable:
        return ()
    # The MTP layer is a model of its own in vLLM, which keeps the checkpoint's names.
    main, draft = _targets(config, RENAMED_TEXT_ONLY if spec.is_text_only else RENAMED), _targets(config, {})
    return tuple(
        _checked(layer, binding, draft if layer.module_class.in_mtp else main, request.tp)
        for layer in vllm_layers(spec)
        if any(module.name in binding.modules for module in layer.modules)
    )


def _checked(layer: VllmLayer, binding: Binding, targets: QuantizationTargets, tp: int) -> CheckedLayer:
    asked = [targets.resolve(name, layer.class_name) for name in layer.asked_names]
    resolution = next((one for one in asked if one.complaint), asked[0])
    schemes = {one.scheme for one in asked}
    problems = [resolution.complaint] if resolution.complaint else []
    if len(schemes) > 1:
        problems.append("gate, up and down of its experts have different schemes, and vLLM takes one for a layer")
    own = {scheme for _, scheme in targets.own_schemes(layer.name)}
    if layer.split is not Split.EXPERTS and len(own) > 1:
        names = " and ".join(module.name.rpartition(".")[2] for module in layer.modules)
        problems.append(f"{names} are one layer in vLLM, and they have different schemes")
    kernel = kernel_of(layer, resolution.scheme)
    problems += [kernel.refusal] if kernel.refusal else []
    problems += split_problems(layer, resolution.scheme, tp)
    bounds = [binding.modules[module.name] for module in layer.modules if module.name in binding.modules]
    problems += dict.fromkeys(text for bound in bounds for text in _stored_problems(bound, resolution.scheme))
    return CheckedLayer(layer, resolution, kernel, tuple(problems))


def _stored_problems(bound: Bound, scheme: Scheme | None) -> Iterator[str]:
    """Where the files and the config differ: vLLM believes the config."""
    stored = bound.stored
    if stored.layout is Layout.PLAIN:
        if scheme is not None:
            yield f"it is stored as {stored}, and the config says {scheme}: list it in `ignore`"
        return
    if scheme is None:
        yield f"it is stored as {stored}, and no target matches it: vLLM makes a BF16 layer of it"
        return
    if stored.layout not in _READ_LAYOUTS:
        yield f"its tensors are {stored.layout.value}, which vLLM's compressed-tensors classes do not read"
    elif _NUMBERS[stored.format] != (scheme.num_bits, scheme.type) or not _same_grouping(stored, scheme):
        yield f"it is stored as {stored}, and the config says {scheme}"
    if stored.has_zero_points == scheme.symmetric:
        has = "has" if stored.has_zero_points else "has no"
        yield f"it {has} zero points, and the config says symmetric: {str(scheme.symmetric).lower()}"


def _same_grouping(stored: Stored, scheme: Scheme) -> bool:
    if stored.layout is Layout.FP8_BLOCK:
        return scheme.strategy == "block"
    if stored.layout in (Layout.FP8_ROW, Layout.FP8_TENSOR):
        return scheme.strategy == ("channel" if stored.layout is Layout.FP8_ROW else "tensor")
    if not stored.group_size:
        return scheme.strategy == "channel"
    return scheme.group_size == stored.group_size


def _layer_findings(layers: tuple[CheckedLayer, ...]) -> Iterator[Finding]:
    """One sentence for each problem of layers of one kind, with the first that has it and the number of others."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for checked in layers:
        kind = re.sub(r"\.\d+\.", ".N.", checked.layer.name)
        for problem in checked.problems:
            names_of.setdefault((kind, problem), []).append(checked.layer.name)
    for (_, problem), names in names_of.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        yield Finding(f"{names[0]}{others}: {problem}.")


def _config_findings(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    method = config.get("quant_method") if config else None
    if method and method != "compressed-tensors":
        yield Finding(
            f"quantization_config has quant_method {method}, which this check does not follow layer by layer; "
            "`onebox build --base DIR --out NEW` with any other format writes compressed-tensors.",
            is_fatal=False,
        )
    architectures = checkpoint.config.get("architectures") or []
    known = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
    if not set(architectures) & set(known):
        yield Finding(f"config.json names no architecture that vLLM has for this family; write {known[0]}.")
    groups = (config or {}).get("config_groups") or {}
    bare = [target for group in groups.values() for target in group.get("targets") or () if target == "lm_head"]
    if bare and not checkpoint.spec.is_text_only:
        yield Finding(
            'A target is the plain name "lm_head", which vLLM does not rename and so never finds: write re:.*lm_head$.'
        )


def _drafter_findings(checkpoint: Checkpoint, binding: Binding, request: CheckRequest) -> Iterator[Finding]:
    method = request.drafter
    if method == "mtp" and not any(binding.of_class(ModuleClass.MTP_FC)):
        yield Finding("Drafts by mtp are asked for, and the checkpoint holds no MTP head.")
    if method == "mtp" and D2T_TENSOR in checkpoint.tensors and _is_read(checkpoint, D2T_TENSOR):
        yield Finding(
            f"{D2T_TENSOR} is a list of draft tokens that vLLM's MTP loader stops at; `onebox build --base DIR --out "
            "NEW` puts it into a file that vLLM skips."
        )
    if request.pp > 1 and method in _BLOCK_METHODS:
        yield Finding(f"vLLM refuses drafts by {method} with pipelines (--pp {request.pp}); use --tp, or mtp.")
    elif request.pp > 1:
        yield Finding(
            f"With --pp {request.pp} vLLM refuses drafts by dflash, eagle3 and dspark; mtp works.", is_fatal=False
        )
    if request.tp * request.pp > 1 and method == "mtp":
        yield Finding(
            "Drafts by mtp with several conversations have crashed on this family (k of 3 to 5, vLLM 0.26; also one "
            "box): start with one or two draft tokens.",
            is_fatal=False,
        )


def _method_findings(request: CheckRequest) -> Iterator[Finding]:
    method, version = request.drafter, request.vllm
    if method is None:
        return
    if method not in METHODS:
        is_known = version is None or version <= READ_VERSION
        yield Finding(f"vLLM {READ_VERSION} has no drafts by {method}; it has {', '.join(METHODS)}.", is_known)
    if method == "dflash" and (version is None or version < MIXED_WINDOW_DFLASH.since):
        feature = MIXED_WINDOW_DFLASH
        yield Finding(f"{feature.name} need vLLM {feature.since}; others {BLOCK_DRAFTERS.since}.", is_fatal=False)


def _is_read(checkpoint: Checkpoint, name: str) -> bool:
    """Whether vLLM reads the file of a tensor: where there is an index, those that it names."""
    index = checkpoint.index
    return index is None or checkpoint.tensors[name].path.name in set(index.values())


def _features(layers: tuple[CheckedLayer, ...], request: CheckRequest) -> tuple[Feature, ...]:
    found = dict.fromkeys(
        feature for checked in layers for feature in needed_features(checked.layer, checked.resolution.scheme)
    )
    multi = [MULTI_NODE] if request.tp * request.pp > 1 else []
    drafts = [BLOCK_DRAFTERS] if request.drafter == "dflash" else []
    return (FAMILY, *multi, *found, *drafts)


def _version_findings(features: tuple[Feature, ...], version: VllmVersion | None) -> Iterator[Finding]:
    if version is None:
        return
    for feature in features:
        if version < feature.since:
            yield Finding(
                f"vLLM {version} does not have {feature.name}: it came with {feature.since} ({feature.source})."
            )
    if version > READ_VERSION:
        yield Finding(f"These are the rules of vLLM {READ_VERSION}; {version} is newer.", is_fatal=False)


def _largest_rank(spec: ModelSpec, binding: Binding, request: CheckRequest) -> dict[ModuleClass, int]:
    stored: dict[ModuleClass, int] = {}
    for bound in binding.modules.values():
        kind = bound.module.module_class
        stored[kind] = stored.get(kind, 0) + bound.nbytes
    held = class_bytes_per_rank(spec, stored, request.tp)
    if request.pp == 1:
        return held
    most = _largest_stage(spec, request.pp)
    return {kind: round(size * _stage_share(kind, spec, most)) for kind, size in held.items()}


def _largest_stage(spec: ModelSpec, pp: int) -> ModelSpec:
    return max(stage_specs(spec, pp), key=lambda stage: stage.num_hidden_layers)


def _stage_share(kind: ModuleClass, spec: ModelSpec, stage: ModelSpec) -> float:
    """Of a class, on the stage with most layers, counted with the embedding or the head, whichever it has."""
    if kind in (ModuleClass.EMBEDDING, ModuleClass.LM_HEAD, ModuleClass.VISION) or kind.in_mtp:
        return 1.0
    if kind is ModuleClass.ATTENTION:
        return len(stage.full_layers) / max(1, len(spec.full_layers))
    if kind in (ModuleClass.DELTA, ModuleClass.DELTA_GATES):
        return len(stage.linear_layers) / max(1, len(spec.linear_layers))
    return stage.num_hidden_layers / spec.num_hidden_layers
