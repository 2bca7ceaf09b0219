"""Speed of a box from the bytes of a step. Three figures, all projected, none measured:

    limit       peak bandwidth / least bytes       upper bound for any engine with these formats on this memory
    expected    usable bandwidth / expected bytes  a step without overhead whose rows select experts independently
    engine      expected plus KERNEL_SECONDS for every kernel of a step: the projected step of this engine

Tokens per step follow from acceptance: `acceptance[i]` is the share of all steps in which draft i+1 is accepted (which
requires that the drafts before it are accepted), and a step yields 1 + sum(acceptance) tokens per stream: 0.9, 0.72
yields 2.62.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from onebox.spec.block_drafter import BlockDrafter
from onebox.spec.errors import UsageError
from onebox.spec.hardware import Bandwidth, Box
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.states import StateDtype
from onebox.spec.traffic import Routing, Traffic, TrafficStep, class_parameters, step_traffic

__all__ = [
    "KERNEL_SECONDS",
    "Projection",
    "Rate",
    "Workload",
    "parse_acceptance",
    "project",
    "step_flops",
    "step_kernels",
    "tokens_per_step",
]

KERNEL_SECONDS = 1.9e-6
"""Overhead of a step per kernel, beyond its bytes: launch and waiting for the previous kernel.

Measured with the whole engine on an H200, 122B shape, 2026-11-16: 541 kernels took 2.349 ms where a copy moves the
bytes in 1.32. With two drafts 585 took 4.056 ms, 0.34 more than this gives: kernels of three rows do not reach a copy's
speed there. That other boxes have the same overhead is an assumption.
"""
_LAYER_KERNELS = 11
_OTHER_KERNELS = 13
_DRAFT_KERNELS = 22
_SHARED_KERNELS = 2
_BLOCK_LAYER_KERNELS = 10
_BLOCK_OTHER_KERNELS = 12
"""A block drafter's layer; its context, embedding, norm, head and choice of tokens."""


@dataclass(frozen=True)
class Workload:
    """The workload: `streams` sequences at `context_tokens` each, `drafts` draft tokens per step.

    `acceptance` has one entry per draft; None: unknown. The limit then accepts every draft, and there is no expected
    rate.
    `drafter_is_mtp` False counts no bytes for drafting (n-gram, or a drafter of unknown size).
    `draft_vocab_size` is the rows of the LM head that a draft reads; None: all.
    `reads_candidates`: the LM head is INT8 in two planes and all rows are greedy or have a top_k of at most 64, without
    penalties, grammars or log-probabilities.
    """

    streams: int = 1
    drafts: int = 0
    context_tokens: int = 0
    acceptance: tuple[float, ...] | None = None
    drafter_is_mtp: bool = True
    state_dtype: StateDtype = StateDtype.FLOAT32
    draft_vocab_size: int | None = None
    reads_candidates: bool = False
    drafter: BlockDrafter | None = None
    """A block drafter, which drafts instead of the MTP head."""

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise UsageError(f"--streams is {self.streams}; give 1 or more.")
        if self.context_tokens < 0:
            raise UsageError(f"--context is {self.context_tokens}; give 0 or more.")
        if self.drafts < 0:
            raise UsageError(f"--speculative-tokens is {self.drafts}; give 0 or more.")
        if self.acceptance is not None:
            _check_acceptance(self.acceptance, self.drafts)
        if self.drafter is not None and self.drafts > self.drafter.spec.max_drafts:
            raise UsageError(
                f"--speculative-tokens is {self.drafts}; the drafter's block of {self.drafter.spec.block_size} has "
                f"{self.drafter.spec.max_drafts} drafts."
            )

    @property
    def mtp_drafts(self) -> int:
        """Drafts of the MTP head."""
        return self.drafts if self.drafter_is_mtp and self.drafter is None else 0

    @property
    def tokens_per_step(self) -> float:
        """Per stream. With unknown acceptance this is the maximum."""
        return 1.0 + self.drafts if self.acceptance is None else tokens_per_step(self.acceptance)


class Rate(NamedTuple):
    """A projected speed. `tokens_per_second` is over all streams."""

    tokens_per_second: float
    step_seconds: float
    bandwidth: Bandwidth


@dataclass(frozen=True)
class Projection:
    """One workload's traffic and speeds. A rate is None if the box's bandwidth or the acceptance is not known."""

    workload: Workload
    least: Traffic
    expected: Traffic
    limit: Rate | None
    expected_rate: Rate | None
    engine_rate: Rate | None
    bandwidth: Bandwidth | None
    """The usable bandwidth, or the peak if none was measured; None if neither is known."""
    engine_step_seconds: float | None
    """Of this engine's step; known without the acceptance. None if the usable bandwidth is not known."""
    compute_seconds: float | None
    """Time of a step's arithmetic at the box's dense BF16 peak; None if no figure is known."""

    @property
    def binds(self) -> str:
        """The bottleneck of the expected step, as text."""
        largest, total = self.expected.largest, self.expected.total_bytes
        part = f"{largest.name}, {largest.bytes / total:.0%} of the bytes"
        if self.bandwidth is None or self.compute_seconds is None:
            return f"not known without a bandwidth and a peak; the largest part is {part}"
        ratio = self.compute_seconds / (total / self.bandwidth.bytes_per_second)
        if ratio > 1:
            return f"compute: BF16 arithmetic takes {ratio:.1f}x the time of the bytes"
        return f"memory: {part}; BF16 arithmetic would take {ratio:.1%} of the time"


def tokens_per_step(acceptance: Sequence[float]) -> float:
    """Tokens per stream and step: one, plus the acceptance of each draft."""
    return 1.0 + sum(acceptance)


def parse_acceptance(text: str, drafts: int | None = None) -> tuple[float, ...]:
    """`--acceptance 0.9,0.72`: one share of all steps per draft position, so the values never rise."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--acceptance {text!r} is not a list of numbers; give for instance 0.9,0.72.") from None
    _check_acceptance(values, len(values) if drafts is None else drafts)
    return values


def _check_acceptance(values: tuple[float, ...], drafts: int) -> None:
    if len(values) != drafts:
        raise UsageError(
            f"--acceptance has {len(values)} values for --speculative-tokens {drafts}; give one per draft token."
        )
    if any(not 0 <= value <= 1 for value in values):
        raise UsageError(
            f"--acceptance {','.join(map(str, values))} leaves 0 to 1; each value is a share of all steps."
        )
    if any(later > earlier for earlier, later in pairwise(values)):
        raise UsageError(
            f"--acceptance {','.join(map(str, values))} rises; a draft is accepted only if those before it are, so "
            "give shares of all steps, such as 0.9,0.72."
        )


def step_flops(spec: ModelSpec, workload: Workload) -> float:
    """FLOPs of a step, two per multiply-add: every row times its active weights, and attention's scores."""
    parameters = class_parameters(spec)
    kind = ModuleClass
    dense = (kind.ATTENTION, kind.DELTA, kind.DELTA_GATES, kind.ROUTER, kind.SHARED)
    active = spec.num_experts_per_tok / spec.num_experts
    head = spec.vocab_size * spec.hidden_size
    row = sum(parameters.get(part, 0) for part in dense) + active * parameters[kind.EXPERTS] + head
    scores = 2 * spec.num_attention_heads * spec.head_dim * workload.context_tokens
    total = (1 + workload.drafts) * (row + len(spec.full_layers) * scores)
    if workload.drafts and workload.drafter is not None:
        rows = 1 + workload.drafts
        block = workload.drafter.flops(rows, workload.tokens_per_step, workload.context_tokens) / 2
        total += block + workload.drafts * (workload.draft_vocab_size or spec.vocab_size) * spec.hidden_size
    elif workload.mtp_drafts:
        layer = (kind.MTP_FC, kind.MTP_ATTENTION, kind.MTP_SHARED, kind.MTP_SMALL)
        draft = sum(parameters[part] for part in layer) + active * parameters[kind.MTP_EXPERTS] + head
        total += workload.drafts * (draft + scores)
    return 2.0 * workload.streams * total


def step_kernels(
    spec: ModelSpec,
    drafts: int,
    formats: Mapping[ModuleClass, str] | None = None,
    drafter: BlockDrafter | None = None,
) -> int:
    """Kernels of a step of this engine with INT4 experts: its layers, the LM head, MTP drafts or a block drafter.

    A shared expert of integers is two kernels of its own; one of FP8 or BF16 is computed beside the router's choice and
    the experts. `formats` are names by class; FP8 where nothing is said.
    """
    held = formats or {}
    layer, draft = (
        count + (_SHARED_KERNELS if held.get(kind, "").startswith("int") else 0)
        for count, kind in ((_LAYER_KERNELS, ModuleClass.SHARED), (_DRAFT_KERNELS, ModuleClass.MTP_SHARED))
    )
    block = drafter.spec.num_hidden_layers * _BLOCK_LAYER_KERNELS + _BLOCK_OTHER_KERNELS if drafter else 0
    return layer * spec.num_hidden_layers + _OTHER_KERNELS + draft * drafts + block


def project(
    spec: ModelSpec,
    stored: Mapping[ModuleClass, int],
    box: Box,
    kv: KVFormat,
    workload: Workload,
    formats: Mapping[ModuleClass, str] | None = None,
) -> Projection:
    """Traffic and speeds of `workload` on `box`, from the bytes stored per class; `formats` as for `step_kernels`."""
    drafter = workload.drafter if workload.drafts else None
    step = TrafficStep(
        streams=workload.streams,
        drafts=workload.drafts,
        context_tokens=workload.context_tokens,
        kept_tokens=workload.tokens_per_step,
        drafter_is_mtp=workload.drafter_is_mtp,
        state_dtype=workload.state_dtype,
        draft_vocab_size=workload.draft_vocab_size,
        reads_candidates=workload.reads_candidates,
        block_bytes=drafter.loaded_bytes if drafter else None,
        block_context_bytes=drafter.context_read_bytes(workload.context_tokens) if drafter else 0,
    )
    least = step_traffic(spec, stored, step, kv, Routing.LEAST)
    expected = step_traffic(spec, stored, step, kv, Routing.EXPECTED)
    compute = step_flops(spec, workload) / box.peak_bf16_flops if box.peak_bf16_flops else None
    acceptance_known = workload.drafts == 0 or workload.acceptance is not None
    rate = _rate(workload, expected, box.usable, compute or 0.0)
    expected_rate = rate if acceptance_known else None
    waiting = KERNEL_SECONDS * step_kernels(spec, workload.mtp_drafts, formats, drafter)
    return Projection(
        workload=workload,
        least=least,
        expected=expected,
        # Arithmetic does not lower the limit: an engine may compute in a narrower type than BF16.
        limit=_rate(workload, least, box.peak, 0.0),
        expected_rate=expected_rate,
        engine_rate=None if expected_rate is None else _later(expected_rate, waiting),
        bandwidth=box.usable or box.peak,
        engine_step_seconds=None if rate is None else rate.step_seconds + waiting,
        compute_seconds=compute,
    )


def _later(rate: Rate, seconds: float) -> Rate:
    """The rate if each step took `seconds` longer."""
    longer = rate.step_seconds + seconds
    return Rate(rate.tokens_per_second * rate.step_seconds / longer, longer, rate.bandwidth)


def _rate(workload: Workload, traffic: Traffic, bandwidth: Bandwidth | None, at_least_seconds: float) -> Rate | None:
    if bandwidth is None:
        return None
    seconds = max(traffic.total_bytes / bandwidth.bytes_per_second, at_least_seconds)
    return Rate(workload.streams * workload.tokens_per_step / seconds, seconds, bandwidth)
