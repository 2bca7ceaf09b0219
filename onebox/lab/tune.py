"""Finds the launch choices that make a decode step fastest on this GPU, by trying them in the whole step.

A kernel alone tells little: what it does to the ones around it decides. So each choice is tried in a captured step of
a model of random weights with a few full-size layers, one choice after the other, and kept where the step gets faster.
No choice changes a bit of any result (`kernels/tuning.py`), so there is nothing to check but time.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from onebox.kernels.tuning import Choice, set_choices
from onebox.kernels.tuning import choices as known_choices
from onebox.model.batch import Batch
from onebox.model.dummy import HYBRID, dummy_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec

__all__ = ["STEPS", "StepShape", "Tuned", "few_layers", "options", "tune"]

_PAGE = 64
_CONTEXT = 64
_REPLAYS = 7
_LEAST_GAIN = 0.0015
"""Of a step's time: less than this is not told from noise."""


@dataclass(frozen=True)
class StepShape:
    """A kind of step whose choices are their own: so many sequences with so many rows each."""

    streams: int
    rows: int
    columns: int
    """Of the integer linears' MMA, which their choices are kept by."""
    crowd: str
    """As the experts' choices are kept by."""


STEPS = (StepShape(1, 1, 8, "one"), StepShape(1, 3, 8, "few"), StepShape(4, 3, 32, "many"))

_SMALL_KERNELS = (
    "add_norm",
    "route_shared",
    "delta_rows",
    "split_heads",
    "attention_piece",
    "attention_combine",
    "delta_prepare",
    "delta_recur",
    "float_parts",
    "planes",
)


@dataclass(frozen=True)
class Tuned:
    """What was found: choices by kernel, and of each kind of step its milliseconds before and after."""

    choices: dict[str, Choice]
    before_ms: dict[str, float]
    after_ms: dict[str, float]


def few_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """The same shape with its first `count` layers only."""
    return replace(spec, num_hidden_layers=count, layer_types=spec.layer_types[:count])


def tune(
    spec: ModelSpec, seconds: float, tell: Callable[[str, float], None] = lambda _name, _milliseconds: None
) -> Tuned:
    """Tries choices for about `seconds`, telling each that is kept and the step's milliseconds with it."""
    deadline = time.monotonic() + seconds
    with torch.inference_mode():
        model = dummy_model(spec, HYBRID, torch.device("cuda"), with_mtp=False)
        choices = known_choices()
        before, after = dict[str, float](), dict[str, float]()
        for number, shape in enumerate(STEPS):
            share = time.monotonic() + (deadline - time.monotonic()) / (len(STEPS) - number)
            step, name = _Step(model, shape), f"{shape.streams}x{shape.rows}"
            before[name] = step.milliseconds(choices)
            choices, after[name] = _descend(step, choices, before[name], share, tell)
    set_choices({})
    return Tuned(choices, before, after)


def _descend(
    step: "_Step",
    choices: dict[str, Choice],
    best: float,
    deadline: float,
    tell: Callable[[str, float], None],
) -> tuple[dict[str, Choice], float]:
    """Tries one option after the other until time is over or a round gains nothing."""
    while True:
        before = best
        for kernel, option in options(step.shape):
            if time.monotonic() > deadline:
                return choices, best
            tried = {**choices, kernel: {**choices.get(kernel, {}), **option}}
            taken = step.milliseconds(tried)
            if taken < best * (1 - _LEAST_GAIN):
                choices, best = tried, taken
                tell(f"{kernel} {option}", taken)
        if best > before * (1 - 2 * _LEAST_GAIN):
            return choices, best


def options(shape: StepShape) -> Iterator[tuple[str, Choice]]:
    """What is tried for a kind of step: the linears and experts first, where the time is."""
    linears = [f"int4_{shape.columns}_{groups}" for groups in (24, 64)]
    experts = [f"gate_up_{shape.crowd}", f"down_{shape.crowd}"]
    for kernel in [*linears, *experts, f"int8_{shape.columns}_24", *_SMALL_KERNELS]:
        yield from ((kernel, {"dependent": mode}) for mode in (0, 1, 2))
    for kernel in [*linears, *experts]:
        yield from ((kernel, {"PREFETCH": is_ahead}) for is_ahead in (0, 1))
        for unroll, registers in ((2, 96), (4, 96), (2, 128), (4, 128), (8, 128), (8, 168), (12, 255)):
            yield kernel, {"UNROLL": unroll, "maxnreg": registers}


class _Step:
    """A step of one kind, timed as a captured graph."""

    def __init__(self, model: Qwen35, shape: StepShape) -> None:
        self.shape = shape
        self._model = model
        self._batch = _batch(shape, model.device)
        pages = shape.streams * 2 + 1
        sizes = MemoryShape(KVFormat.parse("bf16"), pages, shape.streams, 0, shape.rows, with_mtp=False)
        self._memory = Memory.allocate(model.spec, sizes, model.dtype, model.device)

    def milliseconds(self, choices: dict[str, Choice]) -> float:
        """The step's median time under these choices."""
        set_choices(choices)
        self._run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        times = []
        for _ in range(_REPLAYS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(float(begin.elapsed_time(end)))
        return statistics.median(times[2:])

    def _run(self) -> None:
        self._model.logits(self._model.decode(self._batch, self._memory))


def _batch(shape: StepShape, device: torch.device) -> Batch:
    """Rows of `streams` sequences behind a short context, as the decoder would give them."""
    num_rows = shape.streams * shape.rows
    table = torch.arange(1, 1 + 2 * shape.streams, dtype=torch.int32, device=device).view(shape.streams, 2)
    places = torch.arange(_CONTEXT, _CONTEXT + shape.rows, device=device).repeat(shape.streams)
    sequence = torch.arange(shape.streams, device=device).repeat_interleave(shape.rows)
    return Batch(
        token_ids=torch.arange(num_rows, device=device),
        positions=places.expand(3, -1).contiguous(),
        cu_rows=torch.arange(0, num_rows + 1, shape.rows, dtype=torch.int32, device=device),
        slots=torch.arange(shape.streams, dtype=torch.int32, device=device),
        num_accepted=torch.ones(shape.streams, dtype=torch.int32, device=device),
        seen=torch.full((shape.streams,), _CONTEXT + shape.rows, dtype=torch.int32, device=device),
        page_table=table,
        slot_mapping=table.long()[sequence, places // _PAGE] * _PAGE + places % _PAGE,
    )
