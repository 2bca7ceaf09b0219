"""The HTTP response to a request: one JSON object or server-sent events. A client that leaves ends its request."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from onebox.server.answer import AnswerChunk, Answers
from onebox.server.pieces import JsonResponse
from onebox.server.settings import ServerSettings
from onebox.server.sse import EventForm, EventStream, answer_events

__all__ = ["STREAMABLE", "AnswerResponse", "ReplyForm"]

_Result = TypeVar("_Result")

STREAMABLE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""For the OpenAPI page: besides JSON, the answer may come as events."""


class ReplyForm(EventForm, Protocol):
    """How one dialect writes the answers to a request: whole, or as a stream."""

    def whole(self, chunks: Sequence[AnswerChunk]) -> dict[str, Any]:
        """Of each answer's one chunk. Long lists may be `JsonRows` and `JsonParts`. Called beside the event loop."""
        ...


class AnswerResponse(Response):
    """Submits, reads the answers and sends them, all inside one block that owns what was submitted.

    An endpoint returns it and never holds an answer itself, so that no error, no cancellation and no client that is
    gone before the first byte can leave a request open in the engine.
    """

    def __init__(
        self,
        submitted: AbstractAsyncContextManager[Answers],
        form: Callable[[Answers], ReplyForm],
        settings: ServerSettings,
        *,
        is_stream: bool,
    ) -> None:
        """`submitted` as of `Service.submit`; `form` is how the dialect writes the answers."""
        super().__init__()
        self._submitted = submitted
        self._form = form
        self._settings = settings
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A refusal is raised before anything is sent; the application's handlers write it."""
        async with AsyncExitStack() as stack:
            # The engine may have to be started again for it, or a grammar to be tried first.
            answers = await _unless_gone(stack.enter_async_context(self._submitted), receive)
            response = await self._response(answers, receive) if answers else _gone()
            await response(scope, receive, send)

    async def _response(self, answers: Answers, receive: Receive) -> Response:
        form = self._form(answers)
        if self._is_stream:
            return self._events(form)
        chunks = await _unless_gone(answers.whole(), receive)
        return _gone() if chunks is None else JsonResponse(partial(form.whole, chunks))

    def _events(self, form: ReplyForm) -> Response:
        return EventStream(self._stream(form))

    def _stream(self, form: ReplyForm) -> AsyncGenerator[str]:
        return answer_events(form, self._settings.heartbeat_s)


async def _unless_gone(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result | None:
    """What the work returns, or None if the client disconnects first; the work is cancelled then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()


def _gone() -> Response:
    """For the log alone; no client receives it."""
    return Response(status_code=499)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left. The body has been read, so that is the only message to come."""
    while (await receive())["type"] != "http.disconnect":
        pass
