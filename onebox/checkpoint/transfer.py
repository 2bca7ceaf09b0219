"""Reads byte ranges of the files of one commit on the hub, and goes on where a connection was cut.

`resolve` answers a request for a large file with a redirect to a signed address of another server. That address is kept
and used for the file's other ranges until it expires; it gets no token. Every answer of the hub is held to the commit
and the hash that the repository was described with, so that no file is put together from two revisions.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from onebox.checkpoint.hub_errors import hub_error, is_transient
from onebox.checkpoint.repository import RemoteFile, RemoteRepository
from onebox.checkpoint.retry import Retries
from onebox.spec.errors import OneboxError, UnreadableError

__all__ = ["StoppedError", "Transfer"]

_CONNECT_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 8
_REDIRECTS = (301, 302, 303, 307, 308)
# What a signed address answers once it has expired.
_EXPIRED = (401, 403, 404, 410, 416)


class StoppedError(Exception):
    """Raised in a transfer that was told to stop."""


class Transfer:
    """Range requests to one commit. Several threads may use it at once; `stop` ends all of them."""

    def __init__(
        self,
        repository: RemoteRepository,
        stop: threading.Event | None = None,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self._repository = repository
        self._stop = stop or threading.Event()
        self._on_wait = on_wait
        self._headers = build_hf_headers(library_name="onebox")
        self._lock = threading.Lock()
        self._signed: dict[str, str] = {}
        self._etags: dict[str, str] = {}

    def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of a file."""
        parts: list[bytes] = []
        self.stream(file, begin, end, parts.append)
        return b"".join(parts)

    def stream(self, file: RemoteFile, begin: int, end: int, take: Callable[[bytes], None]) -> None:
        """Calls `take` with consecutive parts of the bytes [begin, end); after a cut it asks for the rest alone."""
        position, retries = begin, Retries(self._stop, self._on_wait)
        while position < end:
            try:
                with self._answer(file, (position, end)) as response:
                    for chunk in response.iter_raw():
                        self._check_stopped()
                        _check_length(file, position + len(chunk), end)
                        take(chunk)
                        position += len(chunk)
                        retries.reset()
            except (OneboxError, StoppedError):
                raise
            except Exception as error:
                self._wait_or_raise(error, file, retries)

    def read_whole(self, file: RemoteFile) -> bytes:
        """All bytes of a small file, compressed on the way if the hub does that."""
        retries = Retries(self._stop, self._on_wait)
        while True:
            try:
                with self._answer(file, None) as response:
                    return b"".join(response.iter_bytes())
            except (OneboxError, StoppedError):
                raise
            except Exception as error:
                self._wait_or_raise(error, file, retries)

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def _wait_or_raise(self, error: Exception, file: RemoteFile, retries: Retries) -> None:
        if is_transient(error) and retries.wait(error):
            return
        self._check_stopped()
        raise hub_error(error, self._name(file), self._repository.endpoint) from error

    def _name(self, file: RemoteFile) -> str:
        return f"{file.name} of {self._repository.repo}"

    @contextmanager
    def _answer(self, file: RemoteFile, wanted: tuple[int, int] | None) -> Iterator[Any]:
        """A successful answer with the wanted range, or with the whole file, its body unread."""
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        response = self._request(file, wanted)
        try:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if wanted is not None:
                self._check_range(file, response, wanted)
            yield response
        finally:
            response.close()

    def _request(self, file: RemoteFile, wanted: tuple[int, int] | None) -> Any:
        """Asks the file's signed address; the hub, if there is none or it has expired."""
        with self._lock:
            signed = self._signed.get(file.name)
        if signed:
            response = self._send(signed, wanted)
            if response.status_code not in _EXPIRED:
                self._check_etag(file, response)
                return response
            response.close()
            with self._lock:
                self._signed.pop(file.name, None)
        return self._resolve(file, wanted)

    def _resolve(self, file: RemoteFile, wanted: tuple[int, int] | None) -> Any:
        repository = self._repository
        url = f"{repository.endpoint}/{repository.repo}/resolve/{repository.commit}/{quote(file.name)}"
        for _ in range(_MAX_REDIRECTS):
            response = self._send(url, wanted)
            if self._is_hub(url) and response.status_code < 400:
                self._check_pinned(file, response)
            if response.status_code not in _REDIRECTS:
                self._check_etag(file, response)
                if not self._is_hub(url) and response.status_code < 400:
                    with self._lock:
                        self._signed[file.name] = url
                return response
            url = urljoin(url, response.headers.get("Location", ""))
            response.close()
        raise UnreadableError(f"{self._name(file)} is redirected more than {_MAX_REDIRECTS} times: check HF_ENDPOINT.")

    def _send(self, url: str, wanted: tuple[int, int] | None) -> Any:
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

        self._check_stopped()
        # A token goes to the hub alone; bytes of a range are counted as stored, so they must not be compressed.
        headers = {k: v for k, v in self._headers.items() if k.lower() != "authorization" or self._is_hub(url)}
        if wanted is not None:
            headers |= {"Range": f"bytes={wanted[0]}-{wanted[1] - 1}", "Accept-Encoding": "identity"}
        read_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        timeout = (_CONNECT_TIMEOUT_S, read_s, read_s, None)
        client = get_session()
        request = client.build_request("GET", url, headers=headers, timeout=timeout)
        return client.send(request, stream=True, follow_redirects=False)

    def _is_hub(self, url: str) -> bool:
        return urlsplit(url)[:2] == urlsplit(self._repository.endpoint)[:2]

    def _check_pinned(self, file: RemoteFile, response: Any) -> None:
        commit = response.headers.get("X-Repo-Commit", self._repository.commit)
        linked = _etag(response, "X-Linked-Etag")
        if commit != self._repository.commit or (linked and file.sha256 and linked != file.sha256):
            response.close()
            raise self._changed(file)

    def _check_etag(self, file: RemoteFile, response: Any) -> None:
        """Holds all answers for a file to the first one's tag, whatever server they come from."""
        etag = _etag(response, "ETag")
        if etag and response.status_code in (200, 206):
            with self._lock:
                known = self._etags.setdefault(file.name, etag)
            if known != etag:
                response.close()
                raise self._changed(file)

    def _changed(self, file: RemoteFile) -> UnreadableError:
        return UnreadableError(f"{self._name(file)} changed on the hub while it was read: run the same command again.")

    def _check_range(self, file: RemoteFile, response: Any, wanted: tuple[int, int]) -> None:
        begin, end = wanted
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise UnreadableError(f"{self._name(file)} comes as {encoding}, which was not asked for: check the proxy.")
        if response.status_code == 200 and wanted == (0, file.nbytes):
            return
        given = response.headers.get("Content-Range", "none")
        if re.sub(r"\s+", " ", given) != f"bytes {begin}-{end - 1}/{file.nbytes}":
            raise UnreadableError(
                f"The bytes {begin}-{end - 1} of {file.nbytes:,} were asked of {self._name(file)}, and the answer is "
                f"another range ({given}): check the proxy, or run the same command again."
            )


def _check_length(file: RemoteFile, position: int, end: int) -> None:
    if position > end:
        raise UnreadableError(f"{file.name} came with more bytes than were asked for: check the proxy or HF_ENDPOINT.")


def _etag(response: Any, name: str) -> str:
    """The tag in a header, without the quotes and marks of weakness or compression that servers add."""
    text = str(response.headers.get(name, "")).removeprefix("W/").strip('"')
    return text.removesuffix("-gzip").removesuffix(":gzip")
