"""Refusals on Anthropic's paths in Anthropic's shape: {"type": "error", "error": {"type", "message"}}.

The rest of the server writes OpenAI's shape, and the guards in front of the routes do not know the dialect; so
refusals on Anthropic's paths are translated on their way out.
"""

import json
from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AnthropicErrorReply", "AnthropicErrors", "anthropic_error"]

_PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_INTERNAL = "The server made an error; its log says more."


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicErrorReply(BaseModel):
    """The body of every refusal on these paths."""

    type: Literal["error"]
    error: AnthropicError


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of a response, or an event in a stream that has begun."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicErrors:
    """In front of everything that may refuse a request. Statuses and headers are kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PATH):
            await self._app(scope, receive, send)
            return
        translator = _Translator(scope, receive, send)
        try:
            await self._app(scope, receive, translator)
        except Exception:
            if not translator.has_started:
                await JSONResponse(anthropic_error(500, _INTERNAL), 500)(scope, receive, send)
            # Logged by the error handler.
            raise


class _Translator:
    """Passes a response on, or buffers a refusal until it is complete."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.has_started = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._refusal: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        self.has_started = True
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._refusal = message
        elif self._refusal is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._translated(self._refusal)(self._scope, self._receive, self._send)

    def _translated(self, refusal: Message) -> JSONResponse:
        try:
            message = json.loads(self._body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = self._body.decode(errors="replace")
        response = JSONResponse(anthropic_error(refusal["status"], message), refusal["status"])
        kept = [header for header in refusal["headers"] if header[0] not in (b"content-length", b"content-type")]
        response.raw_headers += kept
        return response
