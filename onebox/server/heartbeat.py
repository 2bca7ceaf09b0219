"""Streams that show a sign of life: agents hang up on a server that says nothing while it reads a long prompt."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

__all__ = ["SILENCE_S", "with_silences"]

SILENCE_S = 15.0
"""Well below the idle limits of clients and proxies, which begin at a minute."""

T = TypeVar("T")


async def with_silences(items: AsyncIterator[T], silence_s: float | None = None) -> AsyncIterator[T | None]:
    """The items as they come, and None each time that none has come for `silence_s` seconds, SILENCE_S unless told."""
    # Waiting on the iterator itself with a limit would end it; a task for every item would be dear.
    queue: asyncio.Queue[T | None] = asyncio.Queue()
    reader = asyncio.ensure_future(_read(items, queue))
    try:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S if silence_s is None else silence_s):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if item is None:
                break
            yield item
        await reader
    finally:
        # Also where it has ended: asyncio then does not log an error that nobody asked for.
        reader.cancel()


async def _read(items: AsyncIterator[T], queue: asyncio.Queue[T | None]) -> None:
    """None in the queue is the end, whether good or bad; the task tells which."""
    try:
        async for item in items:
            queue.put_nowait(item)
    finally:
        queue.put_nowait(None)
