"""Answers of the Responses API that are kept for a while: in memory, or in a directory.

Bounded in number, bytes and age; beyond a bound the oldest go. Each belongs to the API key that it was made with, and
for others there is nothing under its id. An entry holds its whole conversation, so none depends on another.
"""

import contextlib
import copy
import json
import logging
import os
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from onebox.server.errors import ResponseNotFoundError, excerpt
from onebox.server.response_index import ResponseIndex, StoredEntry, is_response_id
from onebox.spec.errors import UnreadableError

__all__ = ["OpenEntry", "ResponseStore", "StoreLimits", "StoredConversation"]

_SUFFIX = ".response"
_OVERHEAD_BYTES = 512
"""Of an entry beside its own bytes."""
_HEAD_BYTES = 512
_SPARE_BYTES = 16 << 20
"""Of answers whose files cannot be written."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreLimits:
    max_bytes: int = 64 << 20
    """Compressed; 0 stores nothing."""
    max_entries: int = 4096
    max_age_s: float = 7 * 86400

    @property
    def max_entry_bytes(self) -> int:
        """Of one entry: a few large ones may not drive out all others."""
        return self.max_bytes // 4

    @property
    def max_entry_text_bytes(self) -> int:
        """Of one entry before it is compressed: a conversation of repeated text takes a thousandth of its size, and
        whoever goes on with it has all of it in memory again.
        """
        return self.max_bytes // 2


class StoredConversation(NamedTuple):
    """What is kept of an answer."""

    response: dict[str, Any]
    """As it was sent."""
    items: list[dict[str, Any]]
    """The conversation up to its end, as the input of the next request."""


class OpenEntry:
    """An entry that begins with the conversation up to its answer and is ended with that.

    It is made before the answer is computed: meanwhile it holds the conversation compressed, and nothing else does.
    """

    def __init__(self, items: list[dict[str, Any]], limits: StoreLimits) -> None:
        """Slow: to be called beside the event loop, like `ended`."""
        self._begun = _EntryText(limits.max_entry_text_bytes)
        self._begun.add_items(items)

    @property
    def is_too_large(self) -> bool:
        return self._begun.is_too_large

    def ended(self, items: list[dict[str, Any]], response: dict[str, Any]) -> bytes | None:
        """The compressed JSON of a StoredConversation; None where it is too large."""
        # Of a copy: a cancelled answer may be ended twice.
        text = self._begun.copy()
        text.add_items(items)
        return text.end(response)


class _EntryText:
    """The JSON of an entry, compressed as it is written."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._compressor = zlib.compressobj(1)
        self._data: list[bytes] = []
        self._num_bytes = self._num_items = 0
        self._add('{"items": [')

    @property
    def is_too_large(self) -> bool:
        return self._num_bytes > self._max_bytes

    def copy(self) -> "_EntryText":
        made = copy.copy(self)
        made._compressor, made._data = self._compressor.copy(), [*self._data]
        return made

    def add_items(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if self.is_too_large:
                self._data = []
                return
            self._add(f"{', ' if self._num_items else ''}{_text(item)}")
            self._num_items += 1

    def end(self, response: dict[str, Any]) -> bytes | None:
        self._add(f'], "response": {_text(response)}}}')
        self._data.append(self._compressor.flush())
        return None if self.is_too_large else b"".join(self._data)

    def _add(self, text: str) -> None:
        encoded = text.encode(errors="replace")
        self._num_bytes += len(encoded)
        self._data.append(self._compressor.compress(encoded))


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Shelf(Protocol):
    """Where the bytes are."""

    def write(self, response_id: str, entry: StoredEntry, data: bytes) -> None: ...
    def read(self, response_id: str) -> bytes: ...
    def remove(self, response_id: str) -> None: ...


class ResponseStore:
    """Used from several threads; slow enough to be called beside the event loop."""

    def __init__(self, limits: StoreLimits, directory: Path | None = None) -> None:
        """`directory` is made where it is missing, and what it holds already is served."""
        self.limits = limits
        self._lock = threading.Lock()
        self._index = ResponseIndex()
        self._num_bytes = 0
        self._shelf: _Shelf = _Memory()
        if directory:
            shelf = _Directory(directory)
            self._shelf = shelf
            for response_id, entry in shelf.entries().items():
                self._index.add(response_id, entry)
                self._num_bytes += entry.num_bytes
            with self._lock:
                self._make_room(0)

    @property
    def is_on(self) -> bool:
        return self.limits.max_bytes > 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, response_id: str, owner: str, kept: StoredConversation) -> bool:
        """Whether it was kept: an entry beyond its limit is not."""
        return self.put_open(response_id, owner, OpenEntry(kept.items, self.limits), [], kept.response)

    def put_open(
        self, response_id: str, owner: str, begun: "OpenEntry", items: list[dict[str, Any]], response: dict[str, Any]
    ) -> bool:
        """The same for an entry that was begun before the answer, which adds `items` to the conversation."""
        data = begun.ended(items, response)
        if data is None:
            return False
        entry = StoredEntry(owner, len(data) + _OVERHEAD_BYTES, time.time())
        if entry.num_bytes > self.limits.max_entry_bytes:
            return False
        with self._lock:
            if response_id in self._index:
                # Cancelled while its end was being stored.
                self._forget(response_id)
            self._make_room(entry.num_bytes)
            try:
                self._shelf.write(response_id, entry, data)
            except OSError as error:
                _log.warning("a response could not be stored: %s", error.strerror)
                return False
            self._index.add(response_id, entry)
            self._num_bytes += entry.num_bytes
        return True

    def get(self, response_id: str, owner: str) -> StoredConversation:
        return self.read(response_id, owner)[0]

    def read(self, response_id: str, owner: str) -> tuple[StoredConversation, int]:
        """With the bytes of its text, of which all is in memory from now on."""
        with self._lock:
            self._check(response_id, owner)
            try:
                data = self._shelf.read(response_id)
            except OSError:
                self._forget(response_id)
                raise self._not_found(response_id) from None
        try:
            text = zlib.decompress(data)
            return StoredConversation(**json.loads(text)), len(text)
        except (zlib.error, ValueError, TypeError):
            self.delete(response_id, owner)
            raise self._not_found(response_id) from None

    def delete(self, response_id: str, owner: str) -> None:
        with self._lock:
            self._check(response_id, owner)
            self._forget(response_id)

    def _check(self, response_id: str, owner: str) -> None:
        entry = self._index.get(response_id)
        if entry is None or entry.owner != owner:
            raise self._not_found(response_id)
        if time.time() - entry.created_at > self.limits.max_age_s:
            self._forget(response_id)
            raise self._not_found(response_id)

    def _make_room(self, num_bytes: int) -> None:
        oldest_kept = time.time() - self.limits.max_age_s
        while found := self._index.oldest():
            response_id, oldest = found
            is_full = len(self._index) >= self.limits.max_entries + (num_bytes == 0)
            if (
                oldest.created_at >= oldest_kept
                and not is_full
                and self._num_bytes + num_bytes <= self.limits.max_bytes
            ):
                return
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        if entry := self._index.remove(response_id):
            self._num_bytes -= entry.num_bytes
        self._shelf.remove(response_id)

    def _not_found(self, response_id: str) -> ResponseNotFoundError:
        days = self.limits.max_age_s / 86400
        how_long = f"for {days:.3g} days, and shorter where newer ones need the room" if self.is_on else "not at all"
        return ResponseNotFoundError(
            f"There is no response {excerpt(response_id)} here; they are stored {how_long}. Send the earlier items in "
            "input instead."
        )


class _Memory:
    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def write(self, response_id: str, _: StoredEntry, data: bytes) -> None:
        self._data[response_id] = data

    def read(self, response_id: str) -> bytes:
        return self._data[response_id]

    def remove(self, response_id: str) -> None:
        del self._data[response_id]


class _Directory:
    """A file for each: a line with its owner and time, then the compressed JSON. Only this user can read them.

    What cannot be written, because the disk is full, is kept in memory: the client was told that it is stored.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spare: dict[str, bytes] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise UnreadableError(f"--responses-dir {directory} cannot be written: {error.strerror}.") from None

    def entries(self) -> dict[str, StoredEntry]:
        """What is there, the oldest first; files that are no entries are left alone."""
        found = {}
        for path in self._directory.glob(f"resp_*{_SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                with path.open("rb") as file:
                    head = json.loads(file.readline(_HEAD_BYTES))
                num_bytes = path.stat().st_size + _OVERHEAD_BYTES
                if is_response_id(path.stem):
                    found[path.stem] = StoredEntry(str(head["owner"]), num_bytes, float(head["created_at"]))
        return dict(sorted(found.items(), key=lambda pair: pair[1].created_at))

    def write(self, response_id: str, entry: StoredEntry, data: bytes) -> None:
        try:
            self._write_file(response_id, entry, data)
        except OSError as error:
            if sum(map(len, self._spare.values())) + len(data) > _SPARE_BYTES:
                raise
            _log.warning("a response could not be written (%s): it is kept in memory", error.strerror)
            self._spare[response_id] = data

    def _write_file(self, response_id: str, entry: StoredEntry, data: bytes) -> None:
        head = json.dumps({"owner": entry.owner, "created_at": entry.created_at}).encode()
        descriptor, name = tempfile.mkstemp(dir=self._directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(head + b"\n" + data)
            Path(name).replace(self._path(response_id))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def read(self, response_id: str) -> bytes:
        if response_id in self._spare:
            return self._spare[response_id]
        with self._path(response_id).open("rb") as file:
            file.readline(_HEAD_BYTES)
            return file.read()

    def remove(self, response_id: str) -> None:
        if self._spare.pop(response_id, None) is not None:
            return
        with contextlib.suppress(OSError):
            self._path(response_id).unlink(missing_ok=True)

    def _path(self, response_id: str) -> Path:
        return self._directory / f"{response_id}{_SUFFIX}"
