"""Middleware in front of the routes: the limits of bodies."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onebox.server.budget import ByteBudget
from onebox.server.errors import BodyTooLongError, CompressedBodyError, error_response
from onebox.spec.errors import OneboxError

__all__ = ["BodyGuard", "RootPath"]

MAX_LENGTH_DIGITS = 18


class RootPath:
    """Takes a prefix off every path that has it, so that guards and routes see their own paths."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == self._prefix or path.startswith(f"{self._prefix}/")):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}
        await self._app(scope, receive, send)


class BodyGuard:
    """Counts the bytes of bodies as they are received, whatever the headers say, and refuses those beyond the limits.

    `budget` is what the bodies of all requests may hold until they are answered; a body's first FREE_BYTES do not
    count, so that large bodies never keep small ones out.
    """

    FREE_BYTES = 64 << 10

    def __init__(self, app: ASGIApp, max_bytes: int, budget: ByteBudget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._header_refusal(Headers(scope=scope))
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        with self._budget.hold(self.FREE_BYTES) as held:

            async def receive_bounded() -> Message:
                message = await receive()
                held.add(len(message.get("body", b"")))
                if held.num_bytes > self._max_bytes:
                    raise self._too_long()
                return message

            await self._app(scope, receive_bounded, send)

    def _header_refusal(self, headers: Headers) -> OneboxError | None:
        """What the header alone tells. That the framing is not contradictory is checked by the connection."""
        # All of them: a second header of the name adds to the first.
        encoding = ", ".join(headers.getlist("content-encoding")).strip().lower()
        if encoding not in ("", "identity"):
            return CompressedBodyError(
                f"The body is compressed ({encoding[:80]!r}), which is not read here; send it without Content-Encoding."
            )
        announced = headers.get("content-length", "0")
        # Of many digits without converting them: Python limits the digits of an integer.
        if announced.isdecimal() and (len(announced) > MAX_LENGTH_DIGITS or int(announced) > self._max_bytes):
            return self._too_long()
        return None

    def _too_long(self) -> BodyTooLongError:
        return BodyTooLongError(f"The body is longer than {self._max_bytes} bytes, the limit.")
