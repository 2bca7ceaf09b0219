"""Bytes of a weight stored in a format, and memory traffic in bytes of one decode step.

Everything is a pure function of the model's shape and of the bytes stored per module class, either read from a
checkpoint's headers or predicted here. Hardware-independent: `onebox.planner.roofline` converts bytes into seconds.

A *step* verifies `1 + drafts` rows of each stream. Dense weights are read once, regardless of the number of rows.
Routed experts are read once per distinct expert. Two figures are given for the number of distinct experts:

    least       all rows select the same experts             num_experts_per_tok
    expected    rows select independently and uniformly      num_experts * (1 - (1 - k/num_experts)^rows)

Activations, new KV entries and the vectors stored for rollback are not counted: together below 0.1% of a step.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from onebox.spec.draft_vocab import draft_head_bytes
from onebox.spec.errors import UsageError
from onebox.spec.head_planes import HIGH_SHARE, head_read_share
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.states import StateDtype
from onebox.spec.weights import (
    DTYPE_BITS,
    PARTS,
    ExpertFormats,
    Geometry,
    Layout,
    StoredTensor,
    WeightFormat,
    tensor_bytes,
)

__all__ = [
    "PACKINGS",
    "ClassFormats",
    "MatrixPacking",
    "Routing",
    "Traffic",
    "TrafficPart",
    "TrafficStep",
    "class_parameters",
    "class_step_bytes",
    "distinct_experts",
    "matrix_bytes",
    "predicted_weight_bytes",
    "step_traffic",
]

ClassBytes = Mapping[ModuleClass, int]
ClassFormats = Mapping[ModuleClass, WeightFormat | ExpertFormats]
"""The format of each class; of routed experts also two, where down projections differ."""
_PLAIN_DTYPES = {WeightFormat.BF16: "BF16", WeightFormat.FP16: "F16", WeightFormat.FP32: "F32"}


@dataclass(frozen=True)
class MatrixPacking:
    """How a format's matrices are stored. `group_size` is the number of columns per scale; 0: one scale per row."""

    layout: Layout
    bits: int
    group_size: int = 0
    scale_dtype: str = "BF16"
    optional: tuple[str, ...] = ()
    """Suffixes of the layout's optional tensors that are present, such as `g_idx`."""


# The packings of published checkpoints. A caller may pass others, for instance pack-quantized INT4.
PACKINGS: Mapping[WeightFormat, MatrixPacking] = {
    WeightFormat.FP8: MatrixPacking(Layout.FP8_BLOCK_INV, 8),
    WeightFormat.INT8: MatrixPacking(Layout.INT8_ROW, 8),
    WeightFormat.INT4: MatrixPacking(Layout.GPTQ, 4, group_size=128, scale_dtype="F16"),
    WeightFormat.INT3: MatrixPacking(Layout.PACKED, 3, group_size=128),
    WeightFormat.INT2: MatrixPacking(Layout.PACKED, 2, group_size=128),
    WeightFormat.NVFP4: MatrixPacking(Layout.NVFP4_DIVIDES, 4, group_size=16),
}


def matrix_bytes(packing: MatrixPacking, rows: int, columns: int) -> int:
    """Exact bytes of all tensors of a matrix [rows, columns], from the layout's shapes."""
    groups = -(-columns // packing.group_size) if packing.group_size else 1
    geometry = Geometry(rows, columns, groups, packing.bits)
    total = 0
    for part in PARTS[packing.layout]:
        if part.required or part.suffix in packing.optional:
            dtype = packing.scale_dtype if _is_scale(part.suffix, part.dtypes, packing) else part.dtypes[0]
            total += tensor_bytes(StoredTensor(dtype, part.shapes(geometry)[0]))
    return total


def _is_scale(suffix: str, dtypes: tuple[str, ...], packing: MatrixPacking) -> bool:
    return "scale" in suffix and packing.scale_dtype in dtypes


def predicted_weight_bytes(
    spec: ModelSpec,
    formats: ClassFormats,
    packings: Mapping[WeightFormat, MatrixPacking] = PACKINGS,
) -> dict[ModuleClass, int]:
    """Predicted bytes per module class of a checkpoint; classes not in `formats` are BF16.

    Only matrices are quantised. Norms, convolutions and the router stay BF16, because quantisation tools skip them.
    """
    result: dict[ModuleClass, int] = {}
    for kind, shapes in _class_shapes(spec).items():
        chosen = formats.get(kind, WeightFormat.BF16)
        result[kind] = sum(count * _module_bytes(group, chosen, packings) for group, count in shapes.items())
    return result


class _ModuleGroup(NamedTuple):
    """What modules that take the same bytes have in common."""

    shape: tuple[int, ...]
    is_matrix: bool
    is_down: bool


def _module_bytes(
    group: _ModuleGroup,
    formats: WeightFormat | ExpertFormats,
    packings: Mapping[WeightFormat, MatrixPacking],
) -> int:
    pair = formats if isinstance(formats, ExpertFormats) else ExpertFormats(formats, formats)
    chosen = pair.down if group.is_down else pair.gate_up
    if group.is_matrix and chosen in packings:
        return matrix_bytes(packings[chosen], group.shape[0], group.shape[1])
    dtype = _PLAIN_DTYPES[chosen] if group.is_matrix else "BF16"
    return _numel(group.shape) * DTYPE_BITS[dtype] // 8


def class_parameters(spec: ModelSpec) -> dict[ModuleClass, int]:
    """The number of parameters per class."""
    return {
        kind: sum(count * _numel(group.shape) for group, count in shapes.items())
        for kind, shapes in _class_shapes(spec).items()
    }


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@lru_cache(maxsize=8)
def _class_shapes(spec: ModelSpec) -> dict[ModuleClass, Counter[_ModuleGroup]]:
    """The number of modules per group and class. 39,000 modules have a few dozen shapes: counted once."""
    result: dict[ModuleClass, Counter[_ModuleGroup]] = {}
    for module in modules(spec):
        group = _ModuleGroup(module.shape, module.is_matrix, module.name.endswith(".down_proj"))
        result.setdefault(module.module_class, Counter())[group] += 1
    return result


class Routing(StrEnum):
    """The assumption about which experts the rows of a step select."""

    LEAST = "least"
    EXPECTED = "expected"


class TrafficStep(NamedTuple):
    """One decode step: every stream verifies one token and `drafts` draft tokens at `context_tokens` of context."""

    streams: int = 1
    drafts: int = 0
    context_tokens: int = 0
    kept_tokens: float = 1.0
    """Tokens per stream and step, on average: accepted drafts plus one. The MTP layer's first pass processes these."""
    drafter_is_mtp: bool = True
    """False counts no bytes for drafting: n-gram, or a drafter of unknown size (then a bound, not a forecast)."""
    draft_vocab_size: int | None = None
    """Rows of the LM head that a draft reads; None: all."""
    state_dtype: StateDtype = StateDtype.FLOAT32
    reads_candidates: bool = False
    """Of a head in two planes, the second is read for tokens that can be sampled, and not for drafts."""
    block_bytes: int | None = None
    """Weights that a block drafter's pass reads; None: there is none. It drafts instead of the MTP head."""
    block_context_bytes: int = 0
    """Keys and values that the pass reads, of one stream."""

    @property
    def rows(self) -> int:
        return self.streams * (1 + self.drafts)


class TrafficPart(NamedTuple):
    name: str
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """The bytes of one step by part, in the order of a forward pass; drafting comes last."""

    parts: tuple[TrafficPart, ...]

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def largest(self) -> TrafficPart:
        return max(self.parts, key=lambda part: part.bytes)


def distinct_experts(spec: ModelSpec, rows: float, routing: Routing) -> float:
    """The number of distinct experts of one layer that `rows` rows read; never fewer than one row's."""
    chosen, experts = spec.num_experts_per_tok, spec.num_experts
    if routing is Routing.LEAST or rows <= 1:
        return chosen
    return float(experts * (1 - (1 - chosen / experts) ** rows))


def step_traffic(spec: ModelSpec, stored: ClassBytes, step: TrafficStep, kv: KVFormat, routing: Routing) -> Traffic:
    """The bytes of a step by part. `stored` is the bytes per module class; an absent class counts as 0."""
    kind = ModuleClass
    parts = [
        ("embedding rows", _embedding_rows(spec, stored, step.rows)),
        ("DeltaNet projections", stored.get(kind.DELTA, 0) + stored.get(kind.DELTA_GATES, 0)),
        ("DeltaNet state", _state_bytes(spec, step)),
        ("attention projections", stored.get(kind.ATTENTION, 0)),
        ("KV cache", step.streams * step.context_tokens * kv.bytes_per_token(spec, with_mtp=False)),
        ("routed experts", _expert_bytes(spec, stored.get(kind.EXPERTS, 0), step.rows, routing)),
        ("shared experts", stored.get(kind.SHARED, 0)),
        ("router, norms, small", stored.get(kind.ROUTER, 0) + stored.get(kind.SMALL, 0)),
        ("LM head", round(_head_bytes(spec, stored) * (head_read_share(step.rows) if step.reads_candidates else 1))),
    ]
    if step.drafts and step.block_bytes is not None:
        parts.append(("drafter", step.block_bytes))
        parts.append(("draft context", step.streams * step.block_context_bytes))
        # One pass drafts the whole block: the head is read once for all of its rows.
        head = draft_head_bytes(_head_bytes(spec, stored), spec.vocab_size, step.draft_vocab_size)
        parts.append(("LM head for drafts", round(head * (HIGH_SHARE if step.reads_candidates else 1))))
    elif step.drafts and step.drafter_is_mtp:
        parts.append(("MTP layer", _mtp_bytes(spec, stored, step, kv, routing)))
        head = draft_head_bytes(_head_bytes(spec, stored), spec.vocab_size, step.draft_vocab_size)
        parts.append(("LM head for drafts", round(step.drafts * head * (HIGH_SHARE if step.reads_candidates else 1))))
    return Traffic(tuple(TrafficPart(name, size) for name, size in parts))


def _expert_bytes(spec: ModelSpec, stored_bytes: int, rows: float, routing: Routing) -> int:
    return round(stored_bytes * distinct_experts(spec, rows, routing) / spec.num_experts)


def _embedding_rows(spec: ModelSpec, stored: ClassBytes, rows: float) -> int:
    return round(stored.get(ModuleClass.EMBEDDING, 0) * rows / spec.vocab_size)


def _head_bytes(spec: ModelSpec, stored: ClassBytes) -> int:
    return stored.get(ModuleClass.EMBEDDING if spec.tie_word_embeddings else ModuleClass.LM_HEAD, 0)


def _state_bytes(spec: ModelSpec, step: TrafficStep) -> int:
    """One read and one write of each stream's matrix state; the convolution reads its rows and writes the new rows."""
    written_conv_bytes = (1 + step.drafts) * 2 * spec.conv_dim
    matrix_bytes_both_ways = 2 * spec.recurrent_state_bytes(step.state_dtype)
    per_layer = matrix_bytes_both_ways + spec.conv_state_bytes_per_layer + written_conv_bytes
    return step.streams * len(spec.linear_layers) * per_layer


def _mtp_bytes(spec: ModelSpec, stored: ClassBytes, step: TrafficStep, kv: KVFormat, routing: Routing) -> int:
    """All passes of the MTP layer in a step, one per draft token. The first also processes the tokens just accepted."""
    kind = ModuleClass
    experts = stored.get(kind.MTP_EXPERTS, 0)
    if not experts:
        raise UsageError("The weights hold no MTP head to draft with; leave out --speculative-tokens.")
    dense = sum(stored.get(part, 0) for part in (kind.MTP_FC, kind.MTP_ATTENTION, kind.MTP_SHARED, kind.MTP_SMALL))
    cache = step.streams * step.context_tokens * kv.bytes_per_token_layer(spec) * spec.mtp_num_hidden_layers
    total = step.drafts * (dense + cache)
    for draft in range(step.drafts):
        rows = step.streams * (max(1.0, step.kept_tokens) if draft == 0 else 1.0)
        total += _expert_bytes(spec, experts, rows, routing) + _embedding_rows(spec, stored, rows)
    return total


def class_step_bytes(spec: ModelSpec, stored: ClassBytes) -> dict[ModuleClass, int]:
    """Bytes of each class read for one token: the main classes in a step without drafts, MTP's in a draft pass."""
    share = spec.num_experts_per_tok / spec.num_experts
    result = dict(stored)
    for kind in (ModuleClass.EXPERTS, ModuleClass.MTP_EXPERTS):
        if kind in result:
            result[kind] = round(result[kind] * share)
    if not spec.tie_word_embeddings:
        result[ModuleClass.EMBEDDING] = _embedding_rows(spec, stored, 1)
    if ModuleClass.VISION in result:
        result[ModuleClass.VISION] = 0
    return result
