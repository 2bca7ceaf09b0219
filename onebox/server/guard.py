"""Middleware in front of the routes: the API key and the limit of bodies."""

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onebox.server.errors import UnauthorizedError, error_response

__all__ = ["ApiKeyGuard", "BodyGuard"]

_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/version"})
_OPEN_FOLDER = "/static/"


class ApiKeyGuard:
    """Refuses requests without the key.

    Open without a key: health and version, for monitoring, and the pages, which ask the user for it.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in _OPEN_PATHS or scope["path"].startswith(_OPEN_FOLDER)
        if is_open or self._holds_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError(
            "The API key is missing or wrong; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
        )
        await error_response(error)(scope, receive, send)

    def _holds_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        return any(hmac.compare_digest(key.encode(), self._api_key) for key in given)


class BodyGuard:
    """Refuses a body over the limit: by its Content-Length, or once more than that has been received."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        num_bytes = int(announced) if announced.isdecimal() else 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            if num_bytes > self._max_bytes:
                self._refuse()
            message = await receive()
            if not announced:
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    self._refuse()
            return message

        await self._app(scope, receive_bounded, send)

    def _refuse(self) -> None:
        # Raised where the handler reads the body; FastAPI passes only HTTPException through unchanged.
        raise HTTPException(413, f"The body is longer than {self._max_bytes} bytes")
