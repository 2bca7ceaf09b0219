"""A complete plan as data, which `onebox plan` renders as text or JSON. Contains no text rendering."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onebox.planner.depths import DepthRate, depth_rates
from onebox.planner.levers import Lever, Setting, assumptions, find_levers, mtp_head_cost
from onebox.planner.memory import MemoryPlan, MemoryRequest, asked_reserve_bytes, plan_memory
from onebox.planner.prefixes import DISK_BYTES_PER_SECOND, PrefixOnDisk, prefixes_on_disk
from onebox.planner.prompts import NEW_TOKENS, PROMPT_LENGTHS, PromptTimes, prompt_times
from onebox.planner.roofline import Projection, Rate, Workload
from onebox.planner.sizing import size_formats, sizing_lines
from onebox.spec.errors import DoesNotFitError, UsageError
from onebox.spec.hardware import Bandwidth, Box
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.traffic import Traffic

__all__ = ["Fit", "PlanReport", "Weights", "make_report", "to_json"]

COMPARED_KV = ("bf16", "fp8", "turboquant")
COMPARED_CONTEXTS = (32_768, 131_072, 262_144)


@dataclass(frozen=True)
class Weights:
    """The weights of a plan: the model's shape, the bytes stored per class, and their source."""

    model: str
    source: str
    spec: ModelSpec
    stored: Mapping[ModuleClass, int]
    problems: tuple[str, ...] = ()
    label: str = "this checkpoint"
    """In a table of formats: a preset's name."""
    formats: Mapping[ModuleClass, str] = field(default_factory=dict)
    """The format of each class by name; `int3/int4` where there are two."""


@dataclass(frozen=True)
class Fit:
    """Capacity of the box with one KV format; figures are None if the plan does not fit."""

    kv: KVFormat
    bytes_per_token: int
    kv_tokens: int | None
    users: Mapping[int, int | None]
    """Context length in tokens -> number of concurrent sequences of that length."""


@dataclass(frozen=True)
class PlanReport:
    """Memory, capacity and speed of one model on one box. Speeds are projected, never measured."""

    weights: Weights
    box: Box
    memory: MemoryPlan
    fits: tuple[Fit, ...]
    projections: tuple[Projection, ...]
    """First without drafts; then the workload with drafts, if any."""
    levers: tuple[Lever, ...]
    """Of the last projection."""
    depths: tuple[DepthRate, ...]
    """Of the last projection's acceptance curve; none without one."""
    assumptions: tuple[str, ...]
    """Of this engine's projected speed."""
    prompts: tuple[PromptTimes, ...]
    """Of this engine; none where the box's speeds are not known."""
    prefixes: tuple[PrefixOnDisk, ...]
    """Of the same prompts, for a disk of this speed."""
    disk_bytes_per_second: float
    notes: tuple[str, ...]


def make_report(
    weights: Weights,
    box: Box,
    request: MemoryRequest,
    workload: Workload,
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND,
) -> PlanReport:
    """Plans memory and projects speed. `request` and `workload` must have the same number of drafts."""
    if workload.context_tokens > request.max_context_tokens:
        raise UsageError(
            f"--context {workload.context_tokens:,} is more than --max-model-len {request.max_context_tokens:,}; "
            "a sequence cannot be longer than that."
        )
    if workload.streams > request.slots:
        raise UsageError(
            f"--streams {workload.streams} is more than --max-num-seqs {request.slots}; "
            "each running sequence needs a slot."
        )
    try:
        memory = plan_memory(weights.spec, weights.stored, box, request)
    except DoesNotFitError as error:
        stored = {weights.label: weights.stored}
        sizings = size_formats(weights.spec, stored, box, request, workload.context_tokens)
        raise DoesNotFitError("\n".join([str(error), *sizing_lines(sizings, box)])) from None
    workloads = [replace(workload, drafts=0, acceptance=None)]
    if workload.drafts:
        workloads.append(workload)
    settings = [Setting(weights.spec, weights.stored, weights.formats, box, request.kv, each) for each in workloads]
    projections = tuple(setting.project() for setting in settings)
    fits = tuple(_fit(weights, box, request, kv) for kv in _compared_kv(request.kv))
    lengths = [length for length in PROMPT_LENGTHS if length <= request.max_context_tokens]
    prompts = prompt_times(weights.spec, weights.stored, box, request.kv, request.max_batched_tokens, lengths)
    prefixes = prefixes_on_disk(weights.spec, request, prompts, disk_bytes_per_second)
    return PlanReport(
        weights=weights,
        box=box,
        memory=memory,
        fits=fits,
        projections=projections,
        levers=find_levers(settings[-1]),
        depths=depth_rates(settings[-1]),
        assumptions=assumptions(settings[-1]),
        prompts=prompts,
        prefixes=prefixes,
        disk_bytes_per_second=disk_bytes_per_second,
        notes=_notes(weights, memory, settings[-1]),
    )


def _compared_kv(chosen: KVFormat) -> list[KVFormat]:
    formats = [KVFormat.parse(name) for name in COMPARED_KV]
    return formats if chosen in formats else [*formats, chosen]


def _fit(weights: Weights, box: Box, request: MemoryRequest, kv: KVFormat) -> Fit:
    longest = request.max_context_tokens
    contexts = sorted({longest, *(context for context in COMPARED_CONTEXTS if context < longest)})
    per_token = kv.bytes_per_token(weights.spec, with_mtp=request.drafts > 0)
    try:
        plan = plan_memory(weights.spec, weights.stored, box, replace(request, kv=kv))
    except DoesNotFitError:
        return Fit(kv, per_token, None, dict.fromkeys(contexts))
    return Fit(kv, per_token, plan.kv_tokens, {context: plan.users_at(context) for context in contexts})


def _notes(weights: Weights, memory: MemoryPlan, setting: Setting) -> tuple[str, ...]:
    box, workload, notes = setting.box, setting.workload, []
    if weights.problems:
        first = weights.problems[0]
        notes.append(f"The checkpoint has {len(weights.problems)} problems (first: {first}); see `onebox inspect`.")
    if box.peak is None:
        notes.append(f"No bandwidth is known for {box.device}, so no speed is projected; the bytes above are valid.")
    elif box.usable is None:
        notes.append(f"No measured bandwidth is known for {box.device}; only the limit is given.")
    if workload.drafts and workload.acceptance is None:
        notes.append("Acceptance is not known: the limit accepts every draft. Give --acceptance for an expectation.")
    cost = mtp_head_cost(setting)
    if cost:
        notes.append(cost)
    if memory.reserve_bytes > asked_reserve_bytes(box, memory.request):
        notes.append("The reserve is larger than requested, because other programs use that much memory now.")
    return tuple(notes)


def to_json(report: PlanReport) -> dict[str, Any]:
    """One JSON object; sizes in bytes, times in seconds, units in the keys."""
    weights, memory = report.weights, report.memory
    return {
        "model": weights.model,
        "weights": {
            "source": weights.source,
            "class_bytes": {kind.value: size for kind, size in weights.stored.items()},
            "class_formats": {kind.value: weights.formats[kind] for kind in weights.stored if kind in weights.formats},
            "problems": list(weights.problems),
        },
        "box": _box_json(report.box),
        "memory": {
            "total_bytes": report.box.memory_bytes,
            "parts": [{"name": part.name, "bytes": part.bytes, "note": part.note} for part in memory.parts],
            "kv_cache_dtype": memory.request.kv.name,
            "mamba_ssm_cache_dtype": memory.request.state_dtype.value,
            "max_model_len_tokens": memory.request.max_context_tokens,
            "max_num_seqs": memory.request.slots,
            "page_tokens": memory.request.page_tokens,
            "page_bytes": memory.page_bytes,
            "num_pages": memory.num_pages,
            "kv_tokens": memory.kv_tokens,
            "slot_bytes": memory.slot_bytes,
            "prefix_checkpoints": memory.num_checkpoints,
        },
        "fits": [
            {
                "kv_cache_dtype": fit.kv.name,
                "bytes_per_token": fit.bytes_per_token,
                "kv_tokens": fit.kv_tokens,
                "users": {str(context): users for context, users in fit.users.items()},
            }
            for fit in report.fits
        ],
        "projected": [_projection_json(projection) for projection in report.projections],
        "depths": [rate._asdict() for rate in report.depths],
        "levers": [lever._asdict() for lever in report.levers],
        "assumptions": list(report.assumptions),
        "prompts": [_prompt_json(times) for times in report.prompts],
        "disk_bytes_per_second": report.disk_bytes_per_second,
        "prefixes_on_disk": [prefix._asdict() for prefix in report.prefixes],
        "notes": list(report.notes),
    }


def _box_json(box: Box) -> dict[str, Any]:
    return {
        "name": box.name,
        "device": box.device,
        "unified": box.unified,
        "memory_bytes": box.memory_bytes,
        "memory_source": box.memory_source,
        "available_bytes": box.available_bytes,
        "peak": _bandwidth_json(box.peak),
        "usable": _bandwidth_json(box.usable),
        "peak_bf16_flops": box.peak_bf16_flops,
        "flops_source": box.flops_source,
    }


def _bandwidth_json(bandwidth: Bandwidth | None) -> dict[str, Any] | None:
    if bandwidth is None:
        return None
    return {"bytes_per_second": bandwidth.bytes_per_second, "source": bandwidth.source}


def _projection_json(projection: Projection) -> dict[str, Any]:
    workload = projection.workload
    return {
        "streams": workload.streams,
        "drafts": workload.drafts,
        "context_tokens": workload.context_tokens,
        "drafter": workload.drafter.format if workload.drafter and workload.drafts else None,
        "acceptance": workload.acceptance,
        "mamba_ssm_cache_dtype": workload.state_dtype.value,
        "draft_vocab_size": workload.draft_vocab_size,
        "tokens_per_step": workload.tokens_per_step,
        "least_bytes": _traffic_json(projection.least),
        "expected_bytes": _traffic_json(projection.expected),
        "limit": _rate_json(projection.limit),
        "expected": _rate_json(projection.expected_rate),
        "engine": _rate_json(projection.engine_rate),
        "compute_seconds": projection.compute_seconds,
        "binds": projection.binds,
    }


def _prompt_json(times: PromptTimes) -> dict[str, float]:
    return {
        "tokens": times.num_tokens,
        "cold_seconds": times.cold_seconds,
        "tokens_per_second": times.tokens_per_second,
        "new_tokens_behind_a_cached_prefix": min(NEW_TOKENS, times.num_tokens),
        "cached_seconds": times.cached_seconds,
    }


def _traffic_json(traffic: Traffic) -> dict[str, int]:
    return {"total": traffic.total_bytes, **{part.name: part.bytes for part in traffic.parts}}


def _rate_json(rate: Rate | None) -> dict[str, float] | None:
    if rate is None:
        return None
    return {"tokens_per_second": rate.tokens_per_second, "step_seconds": rate.step_seconds}
