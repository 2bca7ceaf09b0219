"""Turns whatever huggingface_hub and its HTTP library raise into sentences with what to do.

The HTTP library differs by version of huggingface_hub (httpx, httpx2), so its exceptions are told by the names of their
classes, which are the same in both; a cause that the standard library raised (name lookup, TLS) is searched for in the
chain of causes.
"""

import errno
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from onebox.spec.errors import OneboxError, UnreadableError, WriteError

__all__ = ["RefusedError", "hub_error", "is_transient", "is_unreachable", "retry_after_s", "write_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_AGAIN = "run the same command again to resume"


class RefusedError(UnreadableError):
    """The hub answered, and the answer was a refusal: `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def hub_error(error: BaseException, what: str, endpoint: str) -> OneboxError:
    """The sentence for an error that came up while `what` (a repository or a file of one) was read from the hub."""
    if isinstance(error, OneboxError):
        return error
    response = getattr(error, "response", None)
    if response is not None:
        return _refusal(response, what, endpoint)
    if isinstance(error, OSError) and error.errno in (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS):
        return write_error(error, what)
    return UnreadableError(f"{what} could not be read from the hub: {_transport(error, endpoint)}.")


def write_error(error: OSError, where: object) -> WriteError:
    """The sentence for a file that could not be written."""
    path = error.filename or where
    if error.errno in _FULL:
        return WriteError(f"The disk is full at {path}: what has arrived is kept; free some space and {_AGAIN}.")
    return WriteError(f"{path} cannot be written: {error.strerror or error}.")


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later: a cut, a timeout, a busy or throttling server."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code in (408, 425, 429) or response.status_code >= 500
    if _cause(error, ssl.SSLCertVerificationError):
        return False
    return bool(_names(error) & {"TransportError", "ConnectionError"}) and not _names(error) & {
        "UnsupportedProtocol",
        "OfflineModeIsEnabled",
        "ProxyError",
    }


def is_unreachable(error: BaseException) -> bool:
    """Whether no connection was made at all: no network, no such host, nobody listens."""
    return "ConnectError" in _names(error) or "ConnectTimeout" in _names(error)


def retry_after_s(error: BaseException) -> float | None:
    """The seconds that a throttling server asks to wait, if it says so."""
    return _asked_s(getattr(getattr(error, "response", None), "headers", {}))


def _asked_s(headers: Mapping[str, str]) -> float | None:
    text = str(headers.get("Retry-After", "")).strip()
    if text.isdigit():
        return float(text)
    # The hub's own form: `RateLimit: "api";r=0;t=55`.
    for part in str(headers.get("RateLimit", "")).split(";"):
        name, _, value = part.strip().partition("=")
        if name == "t" and value.isdigit():
            return float(value)
    return None


def _refusal(response: Any, what: str, endpoint: str) -> RefusedError:
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    said = response.headers.get("X-Error-Message", "").rstrip(".")
    said = f" ({said})" if said else ""
    login = "log in with `hf auth login` or set HF_TOKEN"
    match (status, code):
        case (_, "GatedRepo"):
            text = (
                f"{what} is gated: ask for access on its page at {endpoint}, then {login}"
                if not _has_token()
                else f"{what} is gated and your token may not read it: ask for access on its page at {endpoint}"
            )
        case (_, "RevisionNotFound"):
            text = f"The hub has {what}, but not this revision: name a branch, tag or commit that exists"
        case (_, "EntryNotFound"):
            text = f"The hub has no {what}: check the revision"
        case (401 | 404, _):
            text = f"The hub has no {what} that you may read: check the name; if it is private or gated, {login}"
        case (403, _):
            text = f"The hub forbids {what}{said}: check that your token may read it, or {login}"
        case (416, _):
            # What the hub's storage answers to anonymous clients at times, and to a range past the end of a file.
            text = f"The hub's storage refuses a range of {what} (HTTP 416): {login}, and {_AGAIN}"
        case (429, _):
            text = f"The hub throttles {what}: {_throttled(response)}; {login} for a higher limit"
        case (407, _):
            text = f"The proxy asks for a login before {what} can be read: set it in {_proxy() or 'HTTPS_PROXY'}"
        case _ if status >= 500:
            text = f"The hub fails at {what} (HTTP {status}): try later; what has arrived is kept"
        case _:
            text = f"The hub refused {what} with HTTP status {status}{said}"
    return RefusedError(f"{text}.", status)


def _throttled(response: Any) -> str:
    seconds = _asked_s(response.headers)
    return f"wait {seconds:.0f} s and {_AGAIN}" if seconds else f"wait some minutes and {_AGAIN}"


def _transport(error: BaseException, endpoint: str) -> str:
    """Why no answer came, and what to do, as the end of a sentence."""
    names, host = _names(error), urlsplit(endpoint).netloc or endpoint
    certificate = _cause(error, ssl.SSLCertVerificationError)
    if certificate:
        return (
            f"the certificate of {host} is not trusted ({certificate.verify_message}); behind a proxy that opens TLS, "
            "name its certificate in SSL_CERT_FILE, and check this machine's clock"
        )
    if _cause(error, ssl.SSLError):
        return f"TLS with {host} failed ({_cause(error, ssl.SSLError)}); check HF_ENDPOINT and the proxy"
    if "OfflineModeIsEnabled" in names:
        return "HF_HUB_OFFLINE is set; unset it to use the network"
    if "ProxyError" in names:
        return f"the proxy did not connect to {host} ({error}); check {_proxy() or 'HTTPS_PROXY'}"
    if names & {"UnsupportedProtocol", "InvalidURL", "LocalProtocolError"}:
        return f"{endpoint!r} is no address of a hub ({error}); check HF_ENDPOINT"
    if _cause(error, socket.gaierror):
        through = f" or the proxy in {_proxy()}" if _proxy() else ""
        return f"the name of {host}{through} cannot be resolved; check the network, DNS and HF_ENDPOINT"
    if "TimeoutException" in names or isinstance(error, TimeoutError):
        return f"{host} did not answer in time; check the network and {_AGAIN}"
    if "ConnectError" in names or _cause(error, ConnectionRefusedError):
        return f"{host} cannot be reached ({error}); check the network, HF_ENDPOINT and {_proxy() or 'HTTPS_PROXY'}"
    if names & {"TransportError", "ConnectionError"}:
        return f"the connection to {host} was cut ({error or type(error).__name__}); {_AGAIN}"
    return f"{type(error).__name__}: {error}".strip(": .")


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _cause(error: BaseException, kind: type[Any]) -> Any:
    return next((cause for cause in _chain(error) if isinstance(cause, kind)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _proxy() -> str:
    """The name of the variable that sets the proxy, if one does."""
    return next((name for name in _PROXIES if os.environ.get(name)), "")


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
