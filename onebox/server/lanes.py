"""Threads for text work: templates, tokenising, detokenising.

They are the server's own, so that nothing else waits for them, and small work has its own, so that it does not wait for
large. Tokenising lets other threads run; a template does so every few milliseconds.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from onebox.server.pool import WorkPool

__all__ = ["TextLanes", "is_small"]

_Result = TypeVar("_Result")

_SMALL_SIZE = 1 << 16
"""Characters, or values in lists and objects: some tens of milliseconds of work."""
_MAX_LARGE = 16
"""Large work holds large bodies in memory while it waits."""


class TextLanes:
    """Two lanes of threads."""

    def __init__(self) -> None:
        self._small = WorkPool("the tokenising of text", num_threads=2, max_waiting=1024)
        self._large = WorkPool("the tokenising of large texts", num_threads=2, max_waiting=_MAX_LARGE)

    async def run(self, work: Callable[[], _Result], *, is_small: bool) -> _Result:
        """The result of `work` on a thread."""
        return await (self._small if is_small else self._large).run(work)


def is_small(value: Any) -> bool:
    """Whether work on a client's value belongs into the lane of small work. Looks at no more of it than needed."""
    size, waiting = 0, [value]
    while waiting and size <= _SMALL_SIZE:
        held = waiting.pop()
        if isinstance(held, str):
            size += len(held)
        elif isinstance(held, Mapping):
            size += len(held)
            waiting += (*held, *held.values()) if size <= _SMALL_SIZE else ()
        elif isinstance(held, list | tuple):
            size += len(held)
            waiting += held if size <= _SMALL_SIZE else ()
        else:
            size += 1
    return size <= _SMALL_SIZE
