"""A runner with scripted tokens: the engine around it is the real one."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from onebox.engine.step import Result, StepOutput, StepPlan


class DeferredRun(NamedTuple):
    """A step that is computed by `finish`, all of it."""

    finish: Callable[[], StepOutput]


class ScriptedRunner:
    """Answers with `script` from its beginning, token by token, and then over again; checks that no token is lost.

    `gate` holds every step until it is set. A prompt token equal to `fails_on` raises in its chunk.
    """

    vocab_size = 384

    def __init__(self, script=(1, 2, 3), fails_on=None):
        self.script = script
        self.fails_on = fails_on
        self.gate = threading.Event()
        self.gate.set()
        self.plans: list[StepPlan] = []
        self._held: dict[int, int] = {}
        self._drawn: dict[str, int] = {}

    def start(self, plan):
        return DeferredRun(lambda: self.run(plan))

    def run(self, plan):
        self.gate.wait()
        self.plans.append(plan)
        for slot in plan.cleared_slots:
            self._held[slot] = 0
        chunks = tuple(self._chunk(chunk) for chunk in plan.chunks)
        return StepOutput(chunks, tuple(self._rows(rows) for rows in plan.rows))

    @property
    def chunks(self):
        """Every chunk of a prompt that was computed."""
        return [chunk for plan in self.plans for chunk in plan.chunks]

    def _chunk(self, chunk):
        assert self._held[chunk.slot] == chunk.start, "a token was skipped or fed twice"
        self._held[chunk.slot] = chunk.end
        if self.fails_on in chunk.token_ids:
            return ArithmeticError("a scripted failure")
        return Result(self._next(chunk.request_id) if chunk.draw else ())

    def _rows(self, rows):
        assert self._held[rows.slot] == rows.start, "a token was skipped or fed twice"
        self._held[rows.slot] = rows.end
        return Result(self._next(rows.request_id), num_accepted=1)

    def _next(self, request_id):
        index = self._drawn.get(request_id, 0)
        self._drawn[request_id] = index + 1
        return (self.script[index % len(self.script)],)
