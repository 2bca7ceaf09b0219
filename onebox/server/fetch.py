"""Fetches the URL of an image or video: a data URL, a file where the operator allows it, or http(s).

Clients must not reach the server's own network through it. So the host is resolved here, its addresses are checked,
and the connection is made to the checked address itself; every redirect is checked the same way.
"""

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import stat
import string
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from onebox.server.budget import HeldBytes
from onebox.server.errors import ServerBusyError
from onebox.server.pool import WorkPool
from onebox.spec.errors import UsageError
from onebox.text.patches import MediaKind

__all__ = ["Allowance", "FetchLimits", "fetch"]

MAX_REDIRECTS = 5
_SHOWN = 80
"""Characters of a URL that an error message repeats."""
_UNKNOWN_TYPES = ("", "application/octet-stream", "binary/octet-stream")
"""Content types without information."""
_TYPES: dict[MediaKind, tuple[str, ...]] = {"image": ("image/",), "video": ("video/", "image/")}
"""Prefixes of content types; an animated image may be used as a video."""
_SPACES = string.whitespace.encode()
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

MAX_FETCHES = 64
"""URLs being fetched at once, of all requests."""

# A name server that does not answer keeps a thread for longer than the URL's time.
_lookups = WorkPool("the lookup of host names", num_threads=8, max_waiting=64)
_files = WorkPool("the reading of images and videos", num_threads=2, max_waiting=256)
_fetches = threading.BoundedSemaphore(MAX_FETCHES)

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class FetchLimits:
    """Limits that the operator sets."""

    max_bytes: int = 64 << 20
    """Of one image or video."""
    max_total_bytes: int = 128 << 20
    """Of all images and videos of one request."""
    timeout_s: float = 15.0
    """For one URL, redirects included."""
    local_path: Path | None = None
    """The directory whose files `file:` URLs may name; without one they are refused."""
    allows_private: bool = False
    """Whether http(s) URLs may resolve to private, loopback and link-local addresses."""


class Allowance:
    """Counts the bytes that one request loads; `held` are those of all requests."""

    def __init__(self, limits: FetchLimits, held: HeldBytes | None = None) -> None:
        self._limits = limits
        self._held = held
        self._num_bytes = 0

    def take(self, num_new: int, num_before: int = 0) -> None:
        """Adds bytes of one item, of which `num_before` have been counted already."""
        if num_before + num_new > self._limits.max_bytes:
            raise UsageError(f"It is longer than {self._limits.max_bytes} bytes, the limit for one image or video.")
        self._num_bytes += num_new
        if self._num_bytes > self._limits.max_total_bytes:
            raise UsageError(
                f"The request's images and videos are longer than {self._limits.max_total_bytes} bytes together."
            )
        if self._held is not None:
            self._held.add(num_new)


async def fetch(kind: MediaKind, url: str, limits: FetchLimits, allowance: Allowance) -> bytes:
    """The bytes at the URL, not yet known to be an image or video. A refusal is a UsageError."""
    scheme = url[: url.find(":")].lower() if ":" in url else ""
    if scheme == "data":
        return await _files.run(_from_data_url, kind, url, allowance)
    if scheme == "file":
        return await _files.run(_from_file, url, limits, allowance)
    if scheme in ("http", "https"):
        if not _fetches.acquire(blocking=False):
            raise ServerBusyError(f"{MAX_FETCHES} URLs are being fetched, the most at once; try again in a moment.")
        try:
            async with asyncio.timeout(limits.timeout_s):
                return await _from_http(kind, url, limits, allowance)
        except TimeoutError:
            raise UsageError(f"{_shown(url)} did not answer within {limits.timeout_s:g} seconds.") from None
        finally:
            _fetches.release()
    raise UsageError(f"{_shown(url)} is no URL of a kind that is fetched here: data, http, https or file.")


def _shown(url: str) -> str:
    return repr(url if len(url) <= _SHOWN else f"{url[:_SHOWN]}...")


def _refuse_other_type(kind: MediaKind, content_type: str, what: str) -> None:
    name = content_type.partition(";")[0].strip().lower()
    if name not in _UNKNOWN_TYPES and not name.startswith(_TYPES[kind]):
        raise UsageError(f"{what} is of type {name[:_SHOWN]!r}, which is no {kind}.")


# Data URLs and files.


def _from_data_url(kind: MediaKind, url: str, allowance: Allowance) -> bytes:
    head, comma, payload = url[len("data:") :].partition(",")
    content_type, *parameters = head.split(";")
    if not comma or "base64" not in parameters:
        raise UsageError("The data URL is not of the form data:image/png;base64,... .")
    _refuse_other_type(kind, content_type, "The data URL's content")
    try:
        # Not by `split`, which would make an object of every character between two spaces.
        data = base64.b64decode(payload.encode("ascii").translate(None, _SPACES), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"The data URL's base64 cannot be decoded ({error}).") from None
    allowance.take(len(data))
    return data


def _from_file(url: str, limits: FetchLimits, allowance: Allowance) -> bytes:
    if limits.local_path is None:
        raise UsageError("File URLs are not served; the operator allows a directory by --allowed-local-media-path.")
    refusal = UsageError(f"{_shown(url)} is no readable file in the directory that the operator allows.")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{_shown(url)} names a file of another machine; write file:///path.")
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(limits.local_path.resolve(strict=True)):
            raise refusal
        # Non-blocking: opening a named pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - a descriptor
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refusal
            allowance.take(status.st_size)
            return file.read(status.st_size)
    except (OSError, ValueError, RuntimeError):
        # One message for all causes, so that it does not reveal which files exist.
        raise refusal from None


# HTTP.


async def _from_http(kind: MediaKind, url: str, limits: FetchLimits, allowance: Allowance) -> bytes:
    # Without the environment's proxies: a proxy would resolve the name again, unchecked.
    async with httpx.AsyncClient(trust_env=False, timeout=limits.timeout_s) as client:
        for _ in range(MAX_REDIRECTS + 1):
            try:
                answer = await client.send(await _request(client, url, limits), stream=True)
            except (*_FAILURES, OSError) as error:
                raise UsageError(f"{_shown(url)} cannot be fetched ({_reason(error)}).") from None
            try:
                if not answer.has_redirect_location:
                    return await _body(kind, url, answer, allowance)
                url = str(httpx.URL(url).join(answer.headers["location"]))
            except _FAILURES as error:
                raise UsageError(f"{_shown(url)} cannot be fetched ({_reason(error)}).") from None
            finally:
                await answer.aclose()
    raise UsageError(f"{_shown(url)} is the last of more than {MAX_REDIRECTS} redirects.")


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


async def _request(client: httpx.AsyncClient, url: str, limits: FetchLimits) -> httpx.Request:
    """A request to the checked address itself, with the URL's own host name."""
    target = httpx.URL(url)
    if target.scheme not in ("http", "https") or not target.host:
        raise UsageError(f"{_shown(url)} is no http(s) URL with a host.")
    address = await _checked_address(target, limits)
    request = client.build_request(
        "GET",
        target.copy_with(host=address, userinfo=b""),
        headers={"Host": target.netloc.decode("ascii"), "Accept-Encoding": "identity", "User-Agent": "onebox"},
    )
    request.extensions["sni_hostname"] = target.raw_host.decode("ascii")
    return request


async def _checked_address(target: httpx.URL, limits: FetchLimits) -> str:
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        host = target.raw_host.decode("ascii")
        found = await _lookups.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(f"The host of {_shown(str(target))} is not known.") from None
    addresses = [str(place[0]) for _, _, _, _, place in found]
    if not limits.allows_private and not all(map(_is_public, addresses)):
        raise UsageError(
            f"The host of {_shown(str(target))} has a private address, which is not fetched from; the operator may "
            "allow it by --allow-private-media."
        )
    return addresses[0]


def _is_public(address: str) -> bool:
    carried = _carried(ipaddress.ip_address(address.partition("%")[0]))
    return carried.is_global and not carried.is_multicast


def _carried(address: _Address) -> _Address:
    """The IPv4 address embedded in an IPv6 address, if any."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


async def _body(kind: MediaKind, url: str, answer: httpx.Response, allowance: Allowance) -> bytes:
    if answer.status_code != httpx.codes.OK:
        raise UsageError(f"{_shown(url)} answered with status {answer.status_code}.")
    _refuse_other_type(kind, answer.headers.get("content-type", ""), f"What {_shown(url)} answered")
    data = bytearray()
    async for part in answer.aiter_raw():
        allowance.take(len(part), len(data))
        data += part
    return bytes(data)
