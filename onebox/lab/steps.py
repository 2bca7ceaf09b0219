"""What the engine's process notes of its steps, line by line in a file, and what they say. Imports no torch.

A step's work is known from its like: steps are grouped by their prompt tokens, context, rows and first tokens, and a
step is late if it took the device 50 ms longer than the slowest tenth of its group. That is from the device's start of
the step's work to its end, so where the device waits for the host in between, it counts. The host's clock would not do:
nobody waits for a prefill in the middle of a prompt, so its time is in the wait of the step behind it. Time between two
steps while requests run is a wait, too.
"""

import gc
import json
import pickle
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from onebox.engine.engine import Deliver, Engine
from onebox.engine.remote.messages import Planned, ReportStart
from onebox.engine.start import CheckpointStarter, warm_runner
from onebox.engine.step import Runner, StepOutput, StepPlan, StepRun

if TYPE_CHECKING:
    import torch

__all__ = ["Notes", "Step", "TimedStarter", "late_steps", "longest_between", "read_notes"]

LATE_S = 0.05
_MEMORY_EVERY_S = 0.5


class Step(NamedTuple):
    """A step as it was noted. Times in seconds, on a clock that all processes share."""

    began: float
    ended: float
    num_prompt: int
    """Prompt tokens."""
    context: int
    """The end of its furthest prompt."""
    num_rows: int
    """Decode rows."""
    num_first: int
    """Prompts that end in it, whose first token is sampled."""
    cpu_s: float
    """Of the engine's thread: what is missing to the step's own time the system gave to others."""
    collecting_s: float
    """Of Python's garbage collector."""
    num_chunks: int
    """Prompts that it computes a part of."""
    num_adjusted: int
    """Sequences whose logits have penalties, biases or a mask."""
    num_logprobs: int
    """Sequences that get log-probabilities."""
    delivering_s: float
    """Between its start and its end, while the step before it was delivered."""
    num_launches: int
    """Triton kernels that the host launched one by one; those of captured graphs do not count."""
    device_s: float | None = None
    """From the start of its work on the GPU to its end; None without a GPU."""

    @property
    def seconds(self) -> float:
        """Of the host, which may wait in it for the step before and not for all of this one."""
        return self.ended - self.began

    @property
    def own_s(self) -> float:
        """Of its own work."""
        return self.seconds if self.device_s is None else self.device_s

    @property
    def like(self) -> tuple[int, ...]:
        return -(-self.num_prompt // 256), -(-self.context // 4096), -(-self.num_rows // 8), self.num_first

    def as_text(self, late_s: float) -> str:
        """How late it was, and what it did."""
        off_s = self.seconds - self.cpu_s
        return (
            f"{1e3 * self.own_s:.0f} ms, {1e3 * late_s:.0f} beyond its like: {self.num_prompt} tokens of "
            f"{self.num_chunks} prompts up to {self.context}, {self.num_rows} rows, {self.num_first} first tokens, "
            f"{self.num_adjusted} adjusted, {self.num_logprobs} with logprobs, {self.num_launches} launches; the host "
            f"{1e3 * self.seconds:.0f} ms, {1e3 * off_s:.0f} ms not on a CPU, "
            f"{1e3 * self.collecting_s:.0f} ms collecting garbage, {1e3 * self.delivering_s:.0f} ms delivering"
        )


class Notes(NamedTuple):
    """What the engine's process noted, in its order."""

    steps: list[Step]
    used_bytes: list[int]
    """Device memory in use, by anyone; the first when ready."""
    num_segments: list[int]
    """Blocks that torch had taken from the device since its start; the first when ready."""
    kernels: list[str]
    """That Triton was asked to load after the engine was ready."""


class NoteWriter:
    """Writes each note at once: the engine's process is ended without notice."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._memory_at = 0.0

    def note(self, kind: str, value: Any) -> None:
        self._file.write(json.dumps([kind, value]) + "\n")

    def note_memory(self, now: float) -> None:
        if now - self._memory_at < _MEMORY_EVERY_S:
            return
        import torch

        self._memory_at = now
        free, total = torch.cuda.mem_get_info()
        self.note("memory", [total - free, torch.cuda.memory_stats()["segment.all.allocated"]])


class CollectorClock:
    """Adds up the time that the garbage collector takes on the thread that made this."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


class LaunchCount:
    """Counts the launches of Triton kernels."""

    def __init__(self) -> None:
        import triton

        self.number = 0
        triton.knobs.runtime.launch_enter_hook.add(self._count)

    def _count(self, _: object) -> None:
        self.number += 1


class DeviceClock:
    """Measures steps on the GPU's own clock, without waiting for it."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Step, torch.cuda.Event, torch.cuda.Event]] = deque()

    def mark(self) -> "torch.cuda.Event | None":
        """A place in the GPU's queue, the one reached now; None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def measured(self, step: Step, began: "torch.cuda.Event | None") -> list[Step]:
        """The steps so far, this one included, that the GPU has ended since the last call."""
        ended = self.mark()
        if began is None or ended is None:
            return [step]
        self._under_way.append((step, began, ended))
        done = []
        while self._under_way and self._under_way[0][2].query():  # type: ignore[no-untyped-call]
            earlier, first, last = self._under_way.popleft()
            done.append(earlier._replace(device_s=float(first.elapsed_time(last)) / 1e3))
        return done


class Clocks(NamedTuple):
    """The time, that of this thread on a CPU, and that of the garbage collector; and the launches so far."""

    now: float
    cpu: float
    collecting: float
    num_launches: int


class TimedRun(NamedTuple):
    run: StepRun
    plan: StepPlan
    began: Clocks
    started: float
    """When the runner's `start` returned."""
    mark: "torch.cuda.Event | None"
    """Of the device's start."""
    runner: "TimedRunner"

    def finish(self) -> StepOutput:
        delivering_s = time.perf_counter() - self.started
        output = self.run.finish()
        self.runner.note(self, delivering_s)
        return output


class TimedRunner:
    """A runner that notes each step."""

    def __init__(self, runner: Runner, notes: NoteWriter) -> None:
        self._runner = runner
        self._notes = notes
        self._collector = CollectorClock()
        self._launches = LaunchCount()
        self._device = DeviceClock()
        self.vocab_size = runner.vocab_size
        self.encode_images = runner.encode_images
        self.cache_tokens = runner.cache_tokens
        self.put_draft_rows = runner.put_draft_rows

    def start(self, plan: StepPlan) -> TimedRun:
        began, mark = self._clocks(), self._device.mark()
        run = self._runner.start(plan)
        return TimedRun(run, plan, began, time.perf_counter(), mark, self)

    def note(self, timed: TimedRun, delivering_s: float) -> None:
        """Notes a step that has ended on the host."""
        plan, began, ended = timed.plan, timed.began, self._clocks()
        chunks = plan.chunks
        draws = [*(chunk.draw for chunk in chunks if chunk.draw), *(part.draw for part in plan.rows)]
        step = Step(
            began.now,
            ended.now,
            num_prompt=sum(len(chunk.token_ids) for chunk in chunks),
            context=max((chunk.end for chunk in chunks), default=0),
            num_rows=sum(len(part.token_ids) for part in plan.rows),
            num_first=sum(chunk.draw is not None for chunk in chunks),
            cpu_s=ended.cpu - began.cpu,
            collecting_s=ended.collecting - began.collecting,
            num_chunks=len(chunks),
            num_adjusted=sum(bool(draw.adjustments) for draw in draws),
            num_logprobs=sum(draw.sampling.logprobs is not None for draw in draws),
            delivering_s=delivering_s,
            num_launches=ended.num_launches - began.num_launches,
        )
        for done in self._device.measured(step, timed.mark):
            self._notes.note("step", done)
        self._notes.note_memory(ended.now)

    def _clocks(self) -> Clocks:
        return Clocks(time.perf_counter(), time.thread_time(), self._collector.seconds, self._launches.number)


@dataclass(frozen=True)
class TimedStarter(CheckpointStarter):
    """Starts an engine that notes each of its steps in a file."""

    notes: Path = Path("steps")

    def start(self, planned: Planned, report: ReportStart, deliver: Deliver) -> Engine:
        import triton

        plan = pickle.loads(planned.plan)  # noqa: S301 - written by this class's own `plan`
        runner = warm_runner(plan, report, owns_process=True)
        notes = NoteWriter(self.notes.open("w", buffering=1))
        notes.note_memory(time.perf_counter())
        triton.knobs.runtime.jit_post_compile_hook = lambda **known: notes.note("kernel", known["fn"].name)
        return Engine(TimedRunner(runner, notes), plan.config, self.tokens.table, deliver)


def read_notes(path: Path) -> Notes:
    """What was noted so far; the engine may be writing the next line."""
    notes = Notes([], [], [], [])
    whole, _, _ = path.read_text().rpartition("\n")
    for kind, value in map(json.loads, whole.splitlines()):
        if kind == "step":
            notes.steps.append(Step(*value))
        elif kind == "memory":
            notes.used_bytes.append(value[0])
            notes.num_segments.append(value[1])
        else:
            notes.kernels.append(value)
    return notes


def late_steps(steps: list[Step]) -> list[tuple[float, Step]]:
    """Steps that took longer than their like, with the seconds beyond, the latest first."""
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for step in steps:
        groups[step.like].append(step.own_s)
    slow = {like: sorted(times)[int(0.9 * (len(times) - 1))] for like, times in groups.items()}
    late = [(step.own_s - slow[step.like], step) for step in steps if step.own_s - slow[step.like] > LATE_S]
    return sorted(late, reverse=True)


def longest_between(steps: list[Step]) -> list[float]:
    """The longest times between two steps, in seconds."""
    between = (later.began - earlier.ended for earlier, later in pairwise(steps))
    return sorted(between, reverse=True)[:5]
