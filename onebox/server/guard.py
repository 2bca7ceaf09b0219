"""What stands before the routes: the API key and the bound on bodies."""

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onebox.server.errors import UnauthorizedError, error_response

__all__ = ["ApiKeyGuard", "BodyGuard"]

_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/version"})
_OPEN_FOLDER = "/static/"


class ApiKeyGuard:
    """Lets through only what carries the key.

    Whoever watches over the server may ask how it is without one, and a browser may load the page that asks for it.
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
    """Refuses a body beyond the bound: by its announced length, or once more than that has come."""

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
        # Raised where a handler asks for the body, as the one kind of error that passes through it unchanged.
        raise HTTPException(413, f"The body is longer than {self._max_bytes} bytes")
