"""Grammars that wait for a checker: first tries, which are short, and those that need longer, in lanes of their own.

What a grammar takes cannot be told from its text: a few lines may compile for ever. So each is tried for a moment
first, and only where that was not enough, once more and at length. What is quick to check waits for short tries alone,
whoever sends what takes long.
"""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from onebox.engine.grammar.value import Grammar, GrammarError
from onebox.engine.request import EngineStoppedError, QueueFullError

__all__ = ["CheckQueue", "GrammarCheck", "Verdict"]

MAX_FIRST = 16
"""First tries that wait; each takes about a tenth of a second."""
MAX_LONG = 8
"""Long ones that wait; each takes about a second."""

Verdict = GrammarError | None


@dataclass(frozen=True, eq=False)
class GrammarCheck:
    """A grammar and who waits for its verdict."""

    grammar: Grammar
    verdict: "Future[Verdict]"
    is_long: bool = False


class CheckQueue:
    """Two lanes, each in order of arrival; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._first: deque[GrammarCheck] = deque()
        self._long: deque[GrammarCheck] = deque()
        self._is_closed = False

    def put(self, check: GrammarCheck) -> None:
        """Raises QueueFullError where too many wait in its lane, EngineStoppedError where the queue is closed."""
        with self._changed:
            if self._is_closed:
                raise EngineStoppedError("The engine has stopped and accepts nothing more.")
            lane, limit = (self._long, MAX_LONG) if check.is_long else (self._first, MAX_FIRST)
            if len(lane) >= limit:
                which = "that take long to check wait" if check.is_long else "wait to be checked"
                raise QueueFullError(f"{len(lane)} new grammars {which}; try again in a moment.")
            lane.append(check)
            self._changed.notify_all()

    def take(self, *, takes_long: bool) -> GrammarCheck | None:
        """Waits for the next one; None once the queue is closed. Who takes long ones takes them before first tries."""
        with self._changed:
            while not self._is_closed:
                if takes_long and self._long:
                    return self._long.popleft()
                if self._first:
                    return self._first.popleft()
                self._changed.wait()
        return None

    def close(self) -> list[GrammarCheck]:
        """Returns those that still wait."""
        with self._changed:
            self._is_closed = True
            left = [*self._first, *self._long]
            self._first.clear()
            self._long.clear()
            self._changed.notify_all()
        return left
