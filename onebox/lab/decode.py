"""Times the whole engine at full size with random weights on one GPU, from the scheduler to sampling and drafting.

Acceptance of drafts is forced to fixed rates, because random weights predict nothing. A step's time is the median time
between two events of one stream; the bytes that a step must read, at the speed of a device copy, are its lower limit.
"""

import os
import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from onebox.engine.api import (
    Engine,
    EngineConfig,
    Failed,
    Request,
    SamplingParams,
    SpeculationConfig,
    SpeculationMethod,
    Tokens,
)
from onebox.engine.runner import ModelRunner
from onebox.lab.routing import count_experts
from onebox.model.build import trim_model
from onebox.model.drafter import attach_drafter, dummy_drafter_bytes
from onebox.model.dummy import HYBRID, dummy_drafter, dummy_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.dflash import DFlashSpec, refuse_other_target
from onebox.spec.dflash_config import drafter_from_config
from onebox.spec.dflash_memory import ring_tokens
from onebox.spec.dflash_shapes import DFLASH_122B
from onebox.spec.draft_vocab import default_draft_vocab_size, draft_head_bytes
from onebox.spec.errors import DoesNotFitError
from onebox.spec.hardware import GIB
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.states import StateDtype
from onebox.spec.traffic import PACKINGS, ClassFormats, Routing, TrafficStep, predicted_weight_bytes, step_traffic
from onebox.spec.weights import WeightFormat

__all__ = [
    "ACCEPTANCE",
    "BLOCK_ACCEPTANCE",
    "ROWS",
    "DecodeRow",
    "Formats",
    "Measured",
    "copy_speed",
    "generate",
    "kernel_times",
    "measure",
    "open_engine",
    "random_model",
    "row_bytes",
    "start_seconds",
    "weight_bytes",
    "with_experts",
]

Formats = ClassFormats

ACCEPTANCE = (0.9, 0.72)
"""Forced acceptance: how often each draft is accepted, over all steps."""
BLOCK_ACCEPTANCE = tuple(0.9 * 0.863**place for place in range(15))
"""The same of a block drafter's drafts: 6.5 tokens a step with 12 of them, which is what is reported for the 122B's."""
LONG = 100_000
"""Contexts from here on run once, without warm-up: their first token's time includes compilation."""
_COPY_BYTES = 8 << 30
_COPIES = 20
_FIRST_RUNS = 5
_COUNTED_TOKENS, _COUNTED_CONTEXT = 12, 200
"""Of the run in which experts are counted."""


@dataclass(frozen=True)
class DecodeRow:
    """One row of the table: what is decoded, and how many tokens of it."""

    name: str
    streams: int = 1
    context: int = 32
    drafts: int = 0
    is_block: bool = False
    """Whether a DFlash drafter drafts, with random INT4 weights, and not the MTP head."""
    is_trimmed: bool = True
    """Whether drafts have a head of their own, over the default number of tokens."""
    kv: str = "bf16"
    num_tokens: int = 128
    state_dtype: StateDtype = StateDtype.FLOAT32

    @property
    def acceptance(self) -> tuple[float, ...]:
        """How often each draft is accepted."""
        return (BLOCK_ACCEPTANCE if self.is_block else ACCEPTANCE)[: self.drafts]

    @property
    def is_prompt(self) -> bool:
        """Whether it times first tokens alone."""
        return self.num_tokens == 1


_FIRST_TOKENS = (32, 512, 2048, 8000)
_MANY_STREAMS = (8, 16, 32)

ROWS = (
    DecodeRow("plain"),
    DecodeRow("mtp2", drafts=2, num_tokens=256),
    DecodeRow("plain-8k", context=8000),
    DecodeRow("mtp2-full", drafts=2, is_trimmed=False, num_tokens=256),
    DecodeRow("mtp2-8k", context=8000, drafts=2, num_tokens=256),
    *(DecodeRow(f"dflash{drafts}", drafts=drafts, is_block=True, num_tokens=256) for drafts in (7, 12, 15)),
    DecodeRow("dflash12-8k", context=8000, drafts=12, is_block=True, num_tokens=256),
    DecodeRow("dflash7-x4", streams=4, drafts=7, is_block=True, num_tokens=256),
    DecodeRow("plain-x4", streams=4),
    DecodeRow("mtp2-x4", streams=4, drafts=2, num_tokens=256),
    *(DecodeRow(f"plain-x{count}", streams=count) for count in _MANY_STREAMS),
    *(DecodeRow(f"mtp2-x{count}", streams=count, drafts=2, num_tokens=256) for count in _MANY_STREAMS),
    *(DecodeRow(f"first-{count}", context=count, drafts=2, num_tokens=1) for count in _FIRST_TOKENS),
    DecodeRow("plain-128k", context=128_000, num_tokens=48),
    DecodeRow("turboquant-128k", context=128_000, kv="turboquant", num_tokens=48),
    DecodeRow("fp8-128k", context=128_000, kv="fp8", num_tokens=48),
)


@dataclass(frozen=True)
class Measured:
    """The result of one row. `tokens_per_second` is over all streams, `tokens_per_step` of one.

    A row of first tokens has no steps: all that is about them is None.
    """

    row: str
    streams: int
    context: int
    kv: str
    drafts: int
    state_dtype: str
    first_token_s: float
    first_run_s: float
    step_ms: float | None = None
    tokens_per_second: float | None = None
    """Of the steps after the first token."""
    whole_tokens_per_second: float | None = None
    """Of the whole call, first tokens included."""
    tokens_per_step: float | None = None
    bytes_per_step: int | None = None
    """If tokens choose their experts independently."""
    share_of_copy: float | None = None
    experts_per_layer: float | None = None
    """Distinct experts that a layer read in a step, counted."""
    expected_experts: float | None = None
    kernels_per_step: int | None = None

    def as_dict(self) -> dict[str, str | int | float | None]:
        return asdict(self)


def random_model(spec: ModelSpec, formats: Formats = HYBRID) -> Qwen35:
    """Random weights in these formats, on the GPU; what does not fit it is refused."""
    needed, (free, _) = weight_bytes(spec, formats), torch.cuda.mem_get_info()
    if needed > free:
        raise DoesNotFitError(
            f"The weights take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of this GPU are free: "
            "choose a smaller --shape or another --weights."
        )
    with torch.inference_mode():
        model = dummy_model(spec, formats, torch.device("cuda"))
    torch.cuda.synchronize()
    return model


def start_seconds(model: Qwen35) -> float:
    """Seconds from the start of this process to its first generated token, after a prompt of 32 tokens."""
    row = DecodeRow("start", num_tokens=1)
    with open_engine(model, row) as engine:
        generate(engine, row, "start")
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - began


def copy_speed() -> float:
    """Bytes per second, read and written, of a device copy: the ceiling."""
    source = torch.empty(_COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def weight_bytes(spec: ModelSpec, formats: Formats) -> int:
    """Of the whole model on the device, which has no vision tower."""
    sizes = predicted_weight_bytes(spec, formats, PACKINGS)
    return sum(size for kind, size in sizes.items() if kind is not ModuleClass.VISION)


def row_bytes(spec: ModelSpec, row: DecodeRow, formats: Formats = HYBRID) -> int:
    """Bytes that a step of this row moves, if its tokens choose their experts independently."""
    stored = predicted_weight_bytes(spec, formats, PACKINGS)
    size, with_mtp = draft_vocab_size(spec, row), row.drafts > 0 and not row.is_block
    step = TrafficStep(
        row.streams,
        row.drafts,
        row.context,
        drafter_is_mtp=with_mtp,
        draft_vocab_size=size,
        state_dtype=row.state_dtype,
    )
    traffic = step_traffic(spec, stored, step, KVFormat.parse(row.kv), Routing.EXPECTED).total_bytes
    if not row.is_block:
        return traffic
    head = draft_head_bytes(stored[ModuleClass.LM_HEAD], spec.vocab_size, size)
    return traffic + dummy_drafter_bytes(block_drafter_spec(spec), torch.device("cuda")) + head


def block_drafter_spec(spec: ModelSpec) -> DFlashSpec:
    """The published drafter of this model; a model of another shape has none."""
    drafter = drafter_from_config(DFLASH_122B)
    refuse_other_target(drafter, spec)
    return drafter


def draft_vocab_size(spec: ModelSpec, row: DecodeRow) -> int | None:
    """Tokens that the row's drafts are chosen from; None: all, or there are no drafts."""
    return default_draft_vocab_size(spec.vocab_size) if row.drafts and row.is_trimmed else None


def measure(model: Qwen35, row: DecodeRow, ceiling: float, formats: Formats = HYBRID) -> Measured:
    """Runs the row twice and times the second run; a long context runs once, first tokens five times more."""
    runner, config = _runner(model, row)
    with Engine(runner, config) as engine:
        began = perf_counter()
        if row.context < LONG:
            generate(engine, row, "warm")
        first_run = perf_counter() - began
        runs = [generate(engine, row, f"run-{place}") for place in range(_FIRST_RUNS if row.is_prompt else 1)]
    first_token = statistics.median(run.first_token_s for run in runs)
    found = Measured(
        row=row.name,
        streams=row.streams,
        context=row.context,
        kv=row.kv,
        drafts=row.drafts,
        state_dtype=row.state_dtype.value,
        first_token_s=round(first_token, 4),
        first_run_s=round(first_run, 2),
    )
    num_bytes = row_bytes(model.spec, row, formats)
    return found if row.is_prompt else _with_steps(found, runs[0], row, num_bytes, ceiling, runner)


def _with_steps(
    found: Measured, run: "Generated", row: DecodeRow, num_bytes: int, ceiling: float, runner: ModelRunner
) -> Measured:
    # Only the first stream is read as it is generated; the events of the others wait in their queues.
    times = [at for at, _ in run.events]
    median = statistics.median(later - earlier for earlier, later in pairwise(times))
    num_tokens = sum(count for _, count in run.events[1:])
    # The only run of a long context compiles kernels, so its speed is that of the median step.
    seconds = times[-1] - times[0] if row.context < LONG else median * (len(times) - 1)
    return replace(
        found,
        step_ms=round(median * 1e3, 3),
        tokens_per_second=round(row.streams * num_tokens / seconds, 1),
        whole_tokens_per_second=round(row.streams * row.num_tokens / run.seconds, 1),
        tokens_per_step=round(num_tokens / (len(times) - 1), 3),
        bytes_per_step=num_bytes,
        share_of_copy=round(num_bytes / ceiling / median, 3),
        kernels_per_step=runner.num_kernels(),
    )


def with_experts(found: Measured, model: Qwen35, row: DecodeRow) -> Measured:
    """The result of a row with the experts that its steps read, counted in a short run of its own without graphs."""
    if row.is_prompt:
        return found
    short = replace(row, num_tokens=_COUNTED_TOKENS, context=min(row.context, _COUNTED_CONTEXT))
    runner, config = _runner(model, short, with_graphs=False)
    with count_experts(model.spec, row.streams * (1 + row.drafts)) as counted, Engine(runner, config) as engine:
        generate(engine, short, "count")
    if not counted:
        return found
    return replace(found, experts_per_layer=round(counted[0].mean, 2), expected_experts=round(counted[0].expected, 2))


def kernel_times(model: Qwen35, row: DecodeRow) -> Iterator[tuple[str, float, float]]:
    """(kernel, its microseconds a step, its launches a step) of a short run, prefill included, largest first.

    Call it after everything else: a profiled process stays slower. Kernels that start early are timed with their wait.
    """
    with open_engine(model, row) as engine:
        generate(engine, row, "warm")
        before = engine.stats().totals.num_steps
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            generate(engine, row, "run")
            torch.cuda.synchronize()
        steps = engine.stats().totals.num_steps - before
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    for event in sorted(events, key=lambda event: -event.self_device_time_total):
        yield event.key, event.self_device_time_total / steps, event.count / steps


def open_engine(model: Qwen35, row: DecodeRow) -> Engine:
    """An engine with exactly the memory that a row needs."""
    return Engine(*_runner(model, row))


def _runner(model: Qwen35, row: DecodeRow, *, with_graphs: bool = True) -> tuple[ModelRunner, EngineConfig]:
    """The runner and the config of that engine."""
    drafts = row.drafts
    method = SpeculationMethod.MTP if drafts else SpeculationMethod.NONE
    drafter = block_drafter_spec(model.spec) if row.is_block else None
    if drafter:
        method = SpeculationMethod.DFLASH
        with torch.inference_mode():
            model = attach_drafter(model, dummy_drafter(drafter, WeightFormat.INT4, model.device, model.dtype))
    size = draft_vocab_size(model.spec, row)
    if size:
        # Acceptance is forced, so any tokens will do.
        model = trim_model(model, torch.arange(size))
    speculation = SpeculationConfig(
        method,
        drafts,
        synthetic_acceptance=row.acceptance,
        draft_vocab_size=size,
        block_size=drafter.block_size if drafter else 0,
    )
    length = row.context + row.num_tokens + 16
    pages = row.streams * (-(-length // PAGE_TOKENS) + 1)
    config = EngineConfig(
        max_model_len=length,
        num_pages=pages,
        max_num_seqs=row.streams,
        max_num_batched_tokens=8192,
        speculation=speculation,
    )
    kv, with_mtp = KVFormat.parse(row.kv), speculation.with_mtp
    shape = MemoryShape(kv, pages + 1, row.streams, 0, 1 + drafts, with_mtp, row.state_dtype)
    if drafter:
        shape = replace(shape, drafter=drafter, ring_tokens=ring_tokens(drafter, config.max_num_batched_tokens))
    with torch.inference_mode():
        memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
    runner = ModelRunner(model, memory, config)
    if with_graphs:
        runner.capture_graphs()
    return runner, config


class Generated(NamedTuple):
    """A run of a row."""

    first_token_s: float
    seconds: float
    """Until all streams have ended."""
    events: list[tuple[float, int]]
    """The times and sizes of the first stream's."""


def generate(engine: Engine, row: DecodeRow, name: str) -> Generated:
    """Runs the row once. Its prompts are random, and so differ from stream to stream as users' do."""
    prompts = [_prompt(engine, row, f"{name}-{stream}") for stream in range(row.streams)]
    # At temperature 0 a random block drafter drafts one token for all masks, and rows of one token choose few experts.
    temperature = 1.0 if row.is_block else 0.0
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=row.num_tokens, ignore_eos=True)
    began = perf_counter()
    handles = engine.submit_all(
        [Request(f"{name}-{s}", prompt, sampling, cache_prompt=False) for s, prompt in enumerate(prompts)]
    )
    streams: list[list[tuple[float, int]]] = []
    for handle in handles:
        times = []
        for event in handle:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Tokens):
                times.append((perf_counter(), len(event.token_ids)))
        streams.append(times)
    return Generated(streams[0][0][0] - began, perf_counter() - began, streams[0])


def _prompt(engine: Engine, row: DecodeRow, name: str) -> tuple[int, ...]:
    draw = random.Random(name)  # noqa: S311 - a load, not a secret
    return tuple(draw.choices(range(engine.vocab_size), k=row.context))
