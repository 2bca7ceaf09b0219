"""Answers to HTTP: one JSON object, or server-sent events; a client that leaves takes its request with it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from onebox.server.answer import Piece, Usage
from onebox.server.complete import Answers
from onebox.server.errors import error_body
from onebox.spec.errors import OneboxError

__all__ = ["STREAMABLE", "Choice", "EventStream", "Json", "Reply", "event", "usage_json", "whole_or_gone"]

Json = dict[str, Any]

STREAMABLE: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
"""For the OpenAPI page: beside JSON, the answer may come as events."""


class Choice(Protocol):
    """How an endpoint writes one answer: at once, or piece by piece."""

    def whole(self, piece: Piece) -> Json: ...

    def opening(self) -> Json | None:
        """What comes before the first piece."""
        ...

    def chunk(self, piece: Piece) -> Json | None:
        """None: the piece has nothing to show yet."""
        ...

    def ending(self) -> Json: ...


@dataclass(frozen=True)
class Reply:
    """One request's answers in OpenAI's envelope."""

    answers: Answers
    choices: Sequence[Choice]
    model: str
    whole_object: str
    chunk_object: str
    includes_usage: bool = False
    has_continuous_usage: bool = False
    extra: Json | None = None
    """Fields beside the choices: of the whole answer, or of a stream's first chunk."""

    async def whole(self) -> Json:
        """The whole answer in one object."""
        pieces = await self.answers.whole()
        choices = [
            {"index": place, **choice.whole(piece), "finish_reason": answer.finish_reason}
            for place, (choice, piece, answer) in enumerate(
                zip(self.choices, pieces, self.answers.answers, strict=True)
            )
        ]
        head = self._head(self.whole_object)
        return {**head, "choices": choices, "usage": usage_json(self.answers.usage), **(self.extra or {})}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events. An error after the start is an event too: the status line is gone."""
        head = self._head(self.chunk_object)
        extra = self.extra or {}
        opened: set[int] = set()
        try:
            async for place, piece in self.answers.pieces():
                choice = self.choices[place]
                # Not before its first token: clients that measure take the first chunk for the prompt's end.
                if place not in opened and (opening := choice.opening()) is not None:
                    yield self._chunk({**head, **extra}, place, opening)
                    extra = {}
                opened.add(place)
                if piece is None:
                    reason = self.answers.answers[place].finish_reason
                    yield self._chunk({**head, **extra}, place, choice.ending(), reason)
                elif (shown := choice.chunk(piece)) is not None:
                    yield self._chunk({**head, **extra}, place, shown)
                    extra = {}
            if self.includes_usage:
                yield event({**head, "choices": [], "usage": usage_json(self.answers.usage)})
        except OneboxError as error:
            yield event(error_body(error))
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> Json:
        return {"id": self.answers.request_id, "object": kind, "created": int(time.time()), "model": self.model}

    def _chunk(self, head: Json, place: int, choice: Json, finish_reason: str | None = None) -> str:
        body = {**head, "choices": [{"index": place, **choice, "finish_reason": finish_reason}]}
        if self.has_continuous_usage:
            body["usage"] = _plain_usage(self.answers.usage)
        elif self.includes_usage:
            body["usage"] = None
        return event(body)


def _plain_usage(usage: Usage) -> Json:
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_json(usage: Usage) -> Json:
    """In OpenAI's names; drafts of speculative decoding are its predictions."""
    return {
        **_plain_usage(usage),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }


def event(body: Json, name: str | None = None) -> str:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def whole_or_gone(request: Request, answers: Answers, whole: Awaitable[Json]) -> Response:
    """The whole answer as JSON, or nothing for a client that did not wait for it."""
    reply = asyncio.ensure_future(whole)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        # 499 is for the log alone: nobody reads it.
        return JSONResponse(reply.result()) if reply.done() else Response(status_code=499)
    finally:
        answers.close()
        reply.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Returns when the client has left. The body has been read, so that is the only message to come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. `on_close` runs however the response ends: read to the end, cancelled, or cut off.

    A client that takes nothing for `send_timeout_s` seconds is cut off; see `ServerSettings`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None], send_timeout_s: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_close = on_close
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except (ClientDisconnect, TimeoutError):
            # The client stopped reading: there is nobody to tell, and an answer left incomplete closes the connection.
            return
        finally:
            self._on_close()
