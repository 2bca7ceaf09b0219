"""Mixed load on the whole engine on a GPU, from a cold start: what waits, and what memory grows.

The engine starts in a process of its own as `onebox serve` starts it (plan, kernels, weights, graphs, warm-up), with
random weights; the clients are threads of this process.
"""

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onebox.engine.plan import EngineOptions, TokenInfo
from onebox.engine.remote.messages import DeviceMemory, Planned, Progress, StartPhase
from onebox.engine.remote.parent import EngineProcess
from onebox.engine.remote.spawn import EarlyProcess
from onebox.engine.request import Request, SamplingParams
from onebox.lab.clients import LoadClient, quantiles, serve
from onebox.lab.steps import Notes, Step, TimedStarter, late_steps, longest_between, read_notes
from onebox.spec.hardware import GIB
from onebox.spec.shapes import SHAPES

__all__ = ["MixedLoad"]

Figures = dict[str, Any]

_REPORT_EVERY_S = 60.0
_STEP_PLACES = 8
"""Of the time series of device memory: so many values, evenly spaced."""


class MixedLoad:
    """An engine under load. `start` is what its start took: seconds of each phase, GiB in use and planned."""

    def __init__(self, engine: EngineProcess, start: Figures, notes: Path) -> None:
        self.start = start
        self._engine = engine
        self._notes = notes

    @classmethod
    @contextmanager
    def open(
        cls, shape: str, options: EngineOptions, began: float, early: EarlyProcess | None = None
    ) -> Iterator["MixedLoad"]:
        """Starts an engine with random weights; `began` is when the command was given, on time.time's clock.

        `early` is a process for it that was started before.
        """
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
            start: Figures = {}
            starter = TimedStarter(directory, options, TokenInfo(), notes=directory / "steps")
            with EngineProcess(starter, lambda progress: _note_start(progress, start), early=early) as engine:
                engine.wait_ready()
                start["ready_s"] = round(time.time() - began, 2)
                yield cls(engine, start, starter.notes)

    def run(self, num_clients: int, seconds: float, report: Callable[[Figures], None] = lambda _: None) -> Figures:
        """Runs the clients, then one stream alone. `report` gets the figures so far, every minute."""
        vocab_size = self._engine.planned.vocab_size
        clients = [LoadClient(self._engine, number, vocab_size) for number in range(num_clients)]
        serve(clients, seconds, _REPORT_EVERY_S, lambda so_far: report(self._figures(clients, so_far)))
        alone_from = time.perf_counter()
        self._run_alone()
        decode_s = [step.seconds for step in self._steps(alone_from) if not step.num_prompt]
        step_ms = round(1e3 * statistics.median(decode_s), 3)
        return {**self._figures(clients, seconds, alone_from), "one_stream_step_ms": step_ms}

    def _figures(self, clients: list[LoadClient], seconds: float, until: float = math.inf) -> Figures:
        """Of the clients, and of the steps that began before `until`."""
        figures = {"seconds": round(seconds, 1), **_of_clients(clients, seconds)}
        return {**figures, **_of_notes(read_notes(self._notes), until)}

    def _steps(self, since: float) -> list[Step]:
        return [step for step in read_notes(self._notes).steps if step.began >= since]

    def _run_alone(self) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
        for _ in self._engine.submit(Request("alone", tuple(range(32)), sampling)):
            pass


def _note_start(progress: Progress, start: Figures) -> None:
    if isinstance(progress, StartPhase):
        start[f"{progress.name.replace(' ', '_')}_s"] = round(progress.seconds, 2)
    elif isinstance(progress, DeviceMemory):
        start["used_gib"], start["planned_gib"] = map(_gib, progress)
    elif isinstance(progress, Planned):
        start["plan_gib"] = {part.name: _gib(part.bytes) for part in progress.memory.parts}


def _of_clients(clients: list[LoadClient], seconds: float) -> Figures:
    return {
        "requests": sum(len(client.first_s) for client in clients),
        "tokens_per_s": round(sum(client.num_tokens for client in clients) / seconds, 1),
        "failures": [message for client in clients for message in client.failures][:3],
        "first_token_s": quantiles([value for client in clients for value in client.first_s]),
        "between_tokens_s": quantiles([value for client in clients for value in client.gaps_s]),
    }


def _of_notes(notes: Notes, until: float) -> Figures:
    steps = [step for step in notes.steps if step.began < until]
    late = late_steps(steps)
    used = [_gib(value) for value in notes.used_bytes]
    return {
        "steps": len(steps),
        "late_steps": len(late),
        "latest_steps": [step.as_text(late_s) for late_s, step in late[:10]],
        "longest_between_steps_s": [round(value, 4) for value in longest_between(steps)],
        "kernels_asked_for": notes.kernels,
        "used_at_ready_gib": used[0],
        "highest_gib": max(used),
        "used_over_time_gib": used[:: max(1, len(used) // _STEP_PLACES)],
        "segments_after_ready": notes.num_segments[-1] - notes.num_segments[0],
    }


def _gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)
