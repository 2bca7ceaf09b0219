"""The routes. Each handler is validate, prepare, submit, reply; a client that leaves takes its request with it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from onebox import __version__
from onebox.server.complete import Answer, Service, prepare_chat, prepare_completion, submit
from onebox.server.errors import install_error_handlers
from onebox.server.reply import ChatShape, CompletionShape, Shape, event_stream, whole_reply
from onebox.server.schema import ChatRequest, CompletionRequest

__all__ = ["create_app"]


def create_app(service: Service) -> FastAPI:
    """The HTTP application over one engine. Closing the engine is its maker's affair."""
    app = FastAPI(title="onebox", version=__version__)
    install_error_handlers(app)
    created = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        # Rendering and encoding a long conversation takes a while, and the loop has other clients.
        prepared = await asyncio.to_thread(prepare_chat, service, body)
        return await _reply(service, request, submit(service, prepared, "chatcmpl"), ChatShape(), body)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prepared = await asyncio.to_thread(prepare_completion, service, body)
        return await _reply(service, request, submit(service, prepared, "cmpl"), CompletionShape(), body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        limit = service.engine.config.max_model_len
        model = {"id": service.model_name, "object": "model", "created": created, "owned_by": "onebox"}
        return {"object": "list", "data": [{**model, "max_model_len": limit}]}

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.engine.stats().is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return app


async def _reply(
    service: Service, request: Request, answer: Answer, shape: Shape, body: ChatRequest | CompletionRequest
) -> Response:
    if body.stream:
        events = event_stream(answer, shape, service.model_name, includes_usage=body.includes_usage)
        return _EventStream(events, answer.close)
    reply = asyncio.ensure_future(whole_reply(answer, shape, service.model_name))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        # 499 is for the log alone: nobody reads it.
        return JSONResponse(reply.result()) if reply.done() else Response(status_code=499)
    finally:
        answer.close()
        reply.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Returns when the client has left. The body has been read, so that is the only message to come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events. `on_close` runs however the response ends: read to the end, cancelled, or cut off."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
