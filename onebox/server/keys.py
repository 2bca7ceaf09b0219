"""API keys: several, each with a name, a priority and a share of the places for requests.

A key file is TOML or JSON with a list `keys`, or text with one key a line:

    [[keys]]
    name = "batch"
    key = "sk-..."
    priority = 10       # added to the requests' own; the lower number goes first
    max_share = 0.25    # of the places, from 0 to 1
"""

import contextvars
import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["ApiKey", "Caller", "callers_of", "current_caller", "plain_keys", "read_key_file", "unique_keys"]

MAX_PRIORITY = 2**20
_FIELDS = ("name", "key", "priority", "max_share")


@dataclass(frozen=True)
class ApiKey:
    """One client's key."""

    name: str
    """In the log and in the metrics; the key itself is in neither."""
    key: str = field(repr=False)
    priority: int = 0
    """Added to that of its requests. With several keys a request can lower its own priority but not raise it."""
    max_share: float | None = None
    """Of all places for requests, slots and queue together; None: all of them, or an equal share of several keys."""

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise UsageError(f"The API key's name {self.name!r} is empty or not printable; name it differently.")
        if not self.key.strip():
            raise UsageError(f"The API key {self.name!r} is empty, which would leave the server open; give it a value.")
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise UsageError(
                f"The API key {self.name!r} holds spaces or characters beyond printable ASCII, which no header carries."
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > MAX_PRIORITY:
            raise UsageError(f"priority of the API key {self.name!r} must be a whole number within ±{MAX_PRIORITY}.")
        if self.max_share is not None and not (_is_number(self.max_share) and 0 < self.max_share <= 1):
            raise UsageError(f"max_share of the API key {self.name!r} must be a number above 0 and at most 1.")


class Caller(NamedTuple):
    """Whose an HTTP request is."""

    name: str
    priority: int
    max_share: float
    is_one_of_several: bool
    fingerprint: str = ""
    """Of the key: whose stored answers are. The same after a restart, whatever the key is called."""

    def priority_of(self, asked: int) -> int:
        """Of a request that asks for this one. Among several callers nobody goes before others by asking."""
        return self.priority + (max(0, asked) if self.is_one_of_several else asked)


current_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("current_caller", default=None)
"""Of the HTTP request that is being handled; None where the server has no key."""


def callers_of(keys: Sequence[ApiKey]) -> list[Caller]:
    """Of the keys, in their order. Those without a share have an equal one."""
    equal, has_several = 1 / max(1, len(keys)), len(keys) > 1
    return [Caller(key.name, key.priority, key.max_share or equal, has_several, _fingerprint(key.key)) for key in keys]


def _fingerprint(key: str) -> str:
    return hashlib.sha256(f"onebox caller {key}".encode()).hexdigest()[:32]


def plain_keys(keys: Sequence[str]) -> list[ApiKey]:
    """Of values without names: key-1, key-2 and so on."""
    return [ApiKey(f"key-{number}", key) for number, key in enumerate(keys, 1)]


def read_key_file(path: Path) -> list[ApiKey]:
    """The keys of a file; at least one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UnreadableError(f"--api-key-file {path} cannot be read: {reason}.") from None
    if path.suffix in (".toml", ".json"):
        keys = [_entry(path, number, entry) for number, entry in enumerate(_entries(path, text), 1)]
    else:
        lines = [line.strip() for line in text.splitlines()]
        keys = plain_keys([line for line in lines if line and not line.startswith("#")])
    if not keys:
        raise UsageError(f"--api-key-file {path} holds no key, which would leave the server open; add one.")
    return keys


def unique_keys(keys: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    """Refuses a name or a value that two keys share: it would not be known whose a request is."""
    for name in ("name", "key"):
        values = [getattr(key, name) for key in keys]
        twice = next((key for key in keys if values.count(getattr(key, name)) > 1), None)
        if twice:
            raise UsageError(f"Two API keys have the same {name}, that of {twice.name!r}; make each its own.")
    return tuple(keys)


def _entries(path: Path, text: str) -> list[Any]:
    try:
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        # Without the parser's words, which may repeat a key.
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise UnreadableError(f"--api-key-file {path} is not valid {path.suffix[1:].upper()}{where}.") from None
    entries = found.get("keys") if isinstance(found, dict) and found.keys() == {"keys"} else found
    if not isinstance(entries, list):
        raise UsageError(f"--api-key-file {path} must hold a list named keys and nothing else.")
    return entries


def _entry(path: Path, number: int, entry: Any) -> ApiKey:
    where = f"Key {number} of --api-key-file {path}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} must be a table with {', '.join(_FIELDS)}.")
    unknown = sorted(entry.keys() - {*_FIELDS})
    if unknown:
        raise UsageError(f"{where} holds {unknown[0]!r}; it takes {', '.join(_FIELDS)}.")
    name = entry.get("name", f"key-{number}")
    if not isinstance(name, str) or not isinstance(entry.get("key"), str):
        raise UsageError(f"{where} needs a key, and a name if it has one, as text.")
    return ApiKey(**{"name": name, **entry})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
