"""Finds the launch options that make a decode step fastest on this GPU, by trying them in the whole step.

A kernel alone tells little: its effect on the kernels around it decides. So each option is tried in a captured step of
a model of random weights with a few full-size layers, one option after the other, and kept where the step gets faster.
Which kernels there are follows from the model: a first run of the step launches them, and each `Tunable`
(`kernels/common/tuning.py`) says what is tried for it. No option changes a bit of any result, so only time is compared.
The kernels are compiled before that, in parallel processes.
"""

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from onebox.engine.api import SamplingParams
from onebox.engine.batch import exact_inputs
from onebox.engine.shapes import MAX_STEP_ROWS
from onebox.engine.step import DecodeRows, DraftCheck, Draw
from onebox.engine.warm.workers import run_workers
from onebox.kernels.common.ahead import settle_cache_keys
from onebox.kernels.common.target import AbsentGpu
from onebox.kernels.common.tuning import MODES, LaunchOptions, Tunable, known_options, launched, set_options
from onebox.lab.trial_kernels import Options, StepLaunches
from onebox.model.batch import Batch
from onebox.model.dummy import HYBRID, dummy_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.errors import UsageError
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.traffic import ClassFormats

__all__ = ["STEPS", "StepShape", "Tuned", "Tuning", "few_layers", "trials", "tune"]

_REPLAYS = 7
_LEAST_GAIN = 0.0015
"""Of a step's time: a smaller gain is not told from noise."""


@dataclass(frozen=True)
class StepShape:
    """A kind of step that is timed: so many sequences with so many rows each, and how keys and values are stored."""

    streams: int
    rows: int
    kv: str = "bf16"

    def __str__(self) -> str:
        return f"{self.streams}x{self.rows} {self.kv}"

    @classmethod
    def parse(cls, text: str) -> "StepShape":
        """From `32x3` or `1x1:turboquant`."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\w+))?", text)
        if not found or int(found[1]) * int(found[2]) > MAX_STEP_ROWS:
            raise UsageError(
                f"{text!r} is no kind of step: write streams x rows, up to {MAX_STEP_ROWS} rows in all, as in 32x3."
            )
        return cls(int(found[1]), int(found[2]), KVFormat.parse(found[3] or "bf16").name)


STEPS = (
    StepShape(1, 1),
    StepShape(1, 3),
    StepShape(4, 3),
    StepShape(8, 3),
    StepShape(32, 1),
    StepShape(32, 3),
    StepShape(1, 1, "turboquant"),
)


@dataclass(frozen=True)
class Tuned:
    """The options of every kernel that was launched and has any, and each step's milliseconds before and after."""

    options: Options
    before_ms: dict[str, float]
    after_ms: dict[str, float]


def few_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """The same shape with its first `count` layers only."""
    return replace(spec, num_hidden_layers=count, layer_types=spec.layer_types[:count])


@dataclass(frozen=True)
class Tuning:
    """What is tuned, and for how long."""

    spec: ModelSpec
    seconds: float
    formats: ClassFormats = field(default_factory=lambda: HYBRID)
    steps: tuple[StepShape, ...] = STEPS
    kernels: tuple[str, ...] = ("",)
    """How the names of tuned kernels begin."""


def tune(tuning: Tuning, report: Callable[[str, float], None] = lambda _name, _milliseconds: None) -> Tuned:
    """Tries options for about that long; `report` gets each one that is kept and the step's milliseconds with it."""
    deadline = time.monotonic() + tuning.seconds
    compile_trials(tuning, AbsentGpu.of_this_machine())
    with torch.inference_mode():
        model = dummy_model(tuning.spec, tuning.formats, torch.device("cuda"))
        options = known_options()
        steps = [_TimedStep(model, shape, options, tuning.kernels) for shape in tuning.steps]
        for number, step in enumerate(steps):
            share = time.monotonic() + (deadline - time.monotonic()) / (len(steps) - number)
            others = [other for other in steps if other is not step]
            options = _descend(step, others, options, share, report)
        for step in steps:
            step.best_ms = step.milliseconds(options)
    set_options({})
    keys = sorted({key for step in steps for key in step.kernels})
    return Tuned(
        {key: options[key] for key in keys if key in options},
        {str(step.shape): step.first_ms for step in steps},
        {str(step.shape): step.best_ms for step in steps},
    )


def compile_trials(tuning: Tuning, gpu: AbsentGpu) -> int:
    """Has the kernels of all trials compiled into Triton's cache; their number."""
    settle_cache_keys()
    with torch.inference_mode():
        model = dummy_model(tuning.spec, tuning.formats, torch.device("meta"))
        steps = (partial(_run, model, *_step_inputs(shape, model)) for shape in tuning.steps)
        return run_workers(StepLaunches(tuple(steps), known_options(), gpu), lambda _: None)[0]


def _descend(
    step: "_TimedStep",
    others: list["_TimedStep"],
    options: Options,
    deadline: float,
    report: Callable[[str, float], None],
) -> Options:
    """Tries one option after the other until time is over or a round gains nothing; `others` must not get slower."""
    while True:
        before = step.best_ms
        for key, option in trials(step.kernels):
            if time.monotonic() > deadline:
                return options
            tried = {**options, key: {**options.get(key, {}), **option}}
            taken = step.milliseconds(tried)
            # Kinds of steps share kernels: what is faster here may cost another kind, tuned before or not yet.
            if taken < step.best_ms * (1 - _LEAST_GAIN) and _are_as_fast(others, key, tried):
                options, step.best_ms = tried, taken
                report(f"{key} {option}", taken)
        if step.best_ms > before * (1 - 2 * _LEAST_GAIN):
            return options


def _are_as_fast(steps: list["_TimedStep"], key: str, options: Options) -> bool:
    """Whether these options, which differ in those of `key`, cost none of the steps time; if so, they are kept."""
    taken = []
    for step in steps:
        if key in step.kernels:
            taken.append((step, step.milliseconds(options)))
            if taken[-1][1] > step.best_ms * (1 + _LEAST_GAIN):
                return False
    for step, milliseconds in taken:
        step.best_ms = min(step.best_ms, milliseconds)
    return True


def trials(kernels: dict[str, Tunable]) -> Iterator[tuple[str, LaunchOptions]]:
    """(table key, option) pairs in the order of trying: modes of launch first, those of the weights' readers before."""
    by_size = sorted(kernels.items(), key=lambda item: -len(item[1].tried))
    yield from ((key, option) for key, kernel in by_size for option in kernel.tried if option in MODES)
    yield from ((key, option) for key, kernel in by_size for option in kernel.tried if option not in MODES)


class _TimedStep:
    """A step of one kind, with one draft, timed as a captured graph."""

    def __init__(self, model: Qwen35, shape: StepShape, options: Options, kernels: tuple[str, ...]) -> None:
        """Timed with `options` at first; `kernels` as in `Tuning`."""
        self.shape = shape
        self._wanted = kernels
        self._launch = partial(_run, model, *_step_inputs(shape, model))
        self.kernels: dict[str, Tunable] = {}
        """What the step launches and is tuned, by table key."""
        self.first_ms = self.best_ms = self.milliseconds(options)

    def milliseconds(self, options: Options) -> float:
        """The step's median time under these options."""
        set_options(options)
        launched(forget=True)
        try:
            self._launch()
        except OutOfResources:
            return math.inf  # more shared memory than a program may have
        self.kernels = {key: kernel for key, kernel in launched().items() if key.startswith(self._wanted)}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch()
        times = []
        for _ in range(_REPLAYS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(float(begin.elapsed_time(end)))
        return statistics.median(times[2:])


def _step_inputs(shape: StepShape, model: Qwen35) -> tuple[Batch, Memory]:
    """What a step of this kind reads and writes."""
    sizes = MemoryShape(KVFormat.parse(shape.kv), shape.streams * 2 + 1, shape.streams, 0, shape.rows, with_mtp=True)
    return _batch(shape, model.device), Memory.allocate(model.spec, sizes, model.dtype, model.device)


def _run(model: Qwen35, batch: Batch, memory: Memory) -> None:
    """A step with one draft."""
    hidden = model.decode(batch, memory)
    model.logits(hidden)
    if memory.mtp:
        model.logits(model.draft(batch, hidden, memory.mtp))


def _batch(shape: StepShape, device: torch.device) -> Batch:
    """Rows of `streams` sequences behind a short context, as the engine gives them to the model."""
    draw = Draw(SamplingParams(), (-1,) * shape.rows, (DraftCheck.COMPARE,) * shape.rows, first_new=0)
    parts = [
        DecodeRows(
            request_id=str(number),
            slot=number,
            token_ids=tuple(range(number * shape.rows, (number + 1) * shape.rows)),
            start=PAGE_TOKENS,
            num_accepted=1,
            pages=np.array([1 + 2 * number, 2 + 2 * number], dtype=np.int32),
            draw=draw,
        )
        for number in range(shape.streams)
    ]
    return exact_inputs(parts, 0, device).batch
