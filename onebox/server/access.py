"""Who may call: API keys, and on a server without one, the hosts and origins that are its own.

Without a key, a web page in a browser on this machine or network is the danger. By DNS rebinding it calls the server
under a name of its own, so the Host must be one of the server's. By a plain form it sends requests whose answers it
cannot read, so a foreign Origin may not send any. With a key neither reaches anything, and a reverse proxy may pass any
Host; it is then checked only where allowed hosts are named.
"""

import hashlib
import hmac
import ipaddress
import socket
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from onebox.server.errors import ForeignOriginError, NotServedError, UnauthorizedError, UnknownHostError, error_response
from onebox.server.keys import ApiKey, Caller, callers_of, current_caller
from onebox.server.record import current_record

__all__ = ["ApiKeyGuard", "HostGuard", "HostNames", "MetricsPort", "OriginGuard"]

_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/version"})
_OPEN_FOLDER = "/static/"
_METRICS_PATH = "/metrics"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_SHOWN = 80
"""Characters of a header that a refusal repeats."""


class ApiKeyGuard:
    """Refuses requests without one of the keys, and tells the rest of the request's handling whose it is.

    Open without a key: health and version, for monitoring, the pages, which ask the user for it, and the metrics on a
    port of their own.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[ApiKey], metrics_port: int | None = None) -> None:
        self._app = app
        self._metrics_port = metrics_port
        digests = [_digest(key.key.encode()) for key in api_keys]
        self._callers = list(zip(digests, callers_of(api_keys), strict=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._caller_of(Headers(scope=scope))
        if caller or self._is_open(scope):
            current_caller.set(caller)
            if caller and (record := current_record.get()):
                record.key_name = caller.name
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError(
            "The API key is missing or wrong; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
        )
        await error_response(error)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        if _is_at_port(scope, self._metrics_port):
            return bool(path == _METRICS_PATH)
        return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)

    def _caller_of(self, headers: Headers) -> Caller | None:
        """Compares with all keys, each in constant time, whichever it is."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [_digest(text.encode()) for text in given]
        found = None
        for expected, caller in self._callers:
            matches = [hmac.compare_digest(digest, expected) for digest in digests]
            found = caller if any(matches) else found
        return found


class MetricsPort:
    """On the port for scrapers, passes requests for the metrics and refuses all others."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_metrics = scope.get("path") == _METRICS_PATH and scope.get("method") == "GET"
        if not _is_at_port(scope, self._port) or is_metrics:
            await self._app(scope, receive, send)
            return
        error = NotServedError(f"This port serves GET {_METRICS_PATH} alone; the API has a port of its own.")
        await error_response(error)(scope, receive, send)


class HostNames:
    """The names under which the server is called: its own, and those that the operator allows."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        """`allowed` are names, `*.name` for all below one, or `*` for all."""
        self._is_any = "*" in allowed
        self._suffixes = tuple(name[1:].lower() for name in allowed if name.startswith("*."))
        machine = socket.gethostname().lower()
        short = machine.partition(".")[0]
        self._names = {"localhost", machine, short, f"{short}.local", *(name.lower() for name in allowed)}
        # Asks a name server, which may not answer.
        threading.Thread(target=self._add_full_name, name="onebox-hostname", daemon=True).start()

    def holds(self, host: str) -> bool:
        """Whether a Host header names the server. An address does: only a name can be bound to another address."""
        name = _without_port(host)
        if self._is_any or not name or _is_address(name):
            return True
        name = name.removesuffix(".")
        return name in self._names or name.endswith((".localhost", *self._suffixes))

    def _add_full_name(self) -> None:
        self._names = {*self._names, socket.getfqdn().lower()}


class HostGuard:
    """Refuses requests under a name that is not the server's."""

    def __init__(self, app: ASGIApp, names: HostNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        foreign = next((host for host in hosts if not self._names.holds(host)), None)
        if foreign is None:
            await self._app(scope, receive, send)
            return
        shown = _without_port(foreign)[:_MAX_SHOWN]
        error = UnknownHostError(
            f"This server is not known as {shown!r}: call it by address or as localhost, or start it with "
            f"--allowed-hosts '[\"NAME\"]', or with an API key."
        )
        await error_response(error)(scope, receive, send)


class OriginGuard:
    """Refuses requests that pages of other origins send, unless those are allowed; reading is left to CORS."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READING or self._is_own(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        shown = Headers(scope=scope).get("origin", "another origin")[:_MAX_SHOWN]
        error = ForeignOriginError(
            f"Pages of {shown} may not call this server; start it with --allowed-origins '[\"ORIGIN\"]' to allow that."
        )
        await error_response(error)(scope, receive, send)

    def _is_own(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if "*" in self._allowed or origin in self._allowed:
            return True
        if origin is None:
            # Browsers that leave it out say this instead; other clients send neither.
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        try:
            return bool(origin) and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        except ValueError:
            return False


def _is_at_port(scope: Scope, port: int | None) -> bool:
    """Whether the request came in at this port of the server."""
    return port is not None and scope["type"] == "http" and (scope.get("server") or (None, None))[1] == port


def _digest(text: bytes) -> bytes:
    """Of one length for all, so that a comparison does not tell a key's length."""
    return hashlib.sha256(text).digest()


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True
