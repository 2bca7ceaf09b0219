"""Server-sent events: one stream under all dialects, with a heartbeat, and the HTTP response that carries it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from onebox.server.answer import AnswerChunk, Answers
from onebox.server.errors import GenerationError, error_body
from onebox.server.pieces import json_text
from onebox.server.record import current_record
from onebox.spec.errors import OneboxError

__all__ = ["COMMENT", "EventForm", "EventStream", "answer_events", "merged", "sse_event", "sse_text"]

COMMENT = ": keep-alive\n\n"
"""A comment, which clients of server-sent events skip."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def sse_event(body: dict[str, Any], name: str | None = None) -> str:
    return sse_text(json_text(body), name)


def sse_text(text: str, name: str | None = None) -> str:
    """An event of JSON that is written already."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n"


class EventForm(Protocol):
    """How one dialect writes a stream. `place` is the answer's position among those of the request."""

    answers: Answers
    heartbeat: str

    def begin(self) -> Iterable[str]:
        """Sent at once, before the first token."""
        ...

    def chunk(self, place: int, chunk: AnswerChunk) -> Iterable[str]: ...
    def end_answer(self, place: int) -> Iterable[str]: ...
    def end(self) -> Iterable[str]: ...

    def fail(self, error: OneboxError) -> Iterable[str]:
        """An error after the start is an event: the status line has been sent."""
        ...


async def answer_events(form: EventForm, heartbeat_s: float) -> AsyncGenerator[str]:
    """All events of one reply.

    Clients and proxies close a connection that stays silent while a long prompt is read, so a heartbeat is sent
    whenever no chunk has come for `heartbeat_s` seconds.
    """
    try:
        for event in form.begin():
            yield event
        async with aclosing(merged([answer.chunks() for answer in form.answers.answers], heartbeat_s)) as items:
            async for item in items:
                for place, event in enumerate((form.heartbeat,) if item is None else _item_events(form, *item)):
                    if place:
                        # An item may be many events, as a long prompt that is echoed, and others wait for the loop.
                        await asyncio.sleep(0)
                    yield event
        for event in form.end():
            yield event
    except OneboxError as error:
        _record_error(error_body(error)["error"]["code"] or type(error).__name__)
        for event in form.fail(error):
            yield event
    except Exception:
        _log.exception("a stream failed")
        _record_error("server_error")
        for event in form.fail(GenerationError("The server made an error; its log says more.")):
            yield event


def _record_error(code: str) -> None:
    """For the log: the status that was sent tells nothing of it."""
    if record := current_record.get():
        record.error = code


def _item_events(form: EventForm, place: int, chunk: AnswerChunk | None) -> Iterable[str]:
    return form.end_answer(place) if chunk is None else form.chunk(place, chunk)


async def merged(
    streams: Sequence[AsyncIterator[T]], heartbeat_s: float
) -> AsyncGenerator[tuple[int, T | None] | None]:
    """The items of all streams as they come, each with the place of its stream; (place, None) is a stream's end.

    None alone: no item has come for `heartbeat_s` seconds. An error of a stream is raised after the items before it. A
    stream is not read ahead: while an item is handled, an answer's counts are those up to that item.
    """
    # One task per stream, since waiting on an iterator with a timeout would end it, and a task per item is slow.
    queue: asyncio.Queue[tuple[int, T | None] | Exception] = asyncio.Queue()
    handled = [asyncio.Event() for _ in streams]
    readers = [
        asyncio.ensure_future(_read(place, stream, queue, handled[place])) for place, stream in enumerate(streams)
    ]
    num_open = len(readers)
    try:
        while num_open:
            try:
                async with asyncio.timeout(heartbeat_s):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            yield item
            handled[item[0]].set()
            num_open -= item[1] is None
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    place: int,
    stream: AsyncIterator[T],
    queue: "asyncio.Queue[tuple[int, T | None] | Exception]",
    handled: asyncio.Event,
) -> None:
    try:
        async for item in stream:
            queue.put_nowait((place, item))
            await handled.wait()
            handled.clear()
        queue.put_nowait((place, None))
    except Exception as error:
        queue.put_nowait(error)


class EventStream(StreamingResponse):
    """The response. A client that takes nothing of it is cut off by its connection (`ConnectionLimits`)."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            return
        finally:
            # A stream that is left where it is would be ended by the garbage collector, and its readers with it.
            await self._events.aclose()
