"""The HTTP response to a request: one JSON object or server-sent events. A client that leaves ends its request."""

import asyncio
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from onebox.server.settings import ServerSettings
from onebox.server.sse import EventForm, EventStream, answer_events

__all__ = ["STREAMABLE", "ReplyForm", "respond"]

STREAMABLE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""For the OpenAPI page: besides JSON, the answer may come as events."""


class ReplyForm(EventForm, Protocol):
    """How one dialect writes the answers to a request: whole, or as a stream."""

    async def whole(self) -> dict[str, Any]: ...


async def respond(form: ReplyForm, request: Request, settings: ServerSettings, *, is_stream: bool) -> Response:
    if is_stream:
        events = answer_events(form, settings.heartbeat_s)
        return EventStream(events, form.answers.close, settings.send_timeout_s)
    return await _whole_or_gone(form, request)


async def _whole_or_gone(form: ReplyForm, request: Request) -> Response:
    """The whole answer as JSON, or nothing if the client disconnects first."""
    reply = asyncio.ensure_future(form.whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        # 499 is for the log alone; no client receives it.
        return JSONResponse(reply.result()) if reply.done() else Response(status_code=499)
    finally:
        form.answers.close()
        reply.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Returns when the client has left. The body has been read, so that is the only message to come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
