"""A file of token ids, commonest first, with how often each was said: one `id` or `id count` a line.

Lines that start with # are comments. What the engine keeps of its own counting is such a file, whose comments also say
of which model it is; so is the list that a user gives. It holds no text, and no order of tokens but their rank.
"""

import os
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onebox.spec.errors import UnreadableError

__all__ = ["KeptCounts", "counts_path", "read_kept_counts", "read_token_list", "write_kept_counts", "write_token_list"]

_TITLE = "# onebox token counts 1"
_MAX_BYTES = 64 << 20
_MAX_COUNT = 1 << 53


class KeptCounts(NamedTuple):
    """What was counted of one model."""

    model: str
    """Its fingerprint."""
    vocab_size: int
    counts: dict[int, int]


def counts_path(cache: Path, model: str) -> Path:
    """Where the counts of the model with this fingerprint are kept, in the user's cache directory."""
    return cache / "draft-vocab" / f"{model[:32]}.txt"


def read_token_list(path: Path, vocab_size: int) -> list[int]:
    """The tokens of a file in their order, or with counts the commonest first; each once and in the vocabulary."""
    counts = _entries(path, _read(path), vocab_size)
    if not counts:
        raise UnreadableError(f"{path} holds no token id; it takes one a line, the commonest first.")
    if any(counts.values()):
        return sorted(counts, key=lambda token_id: -counts[token_id])
    return list(counts)


def read_kept_counts(path: Path, model: str, vocab_size: int) -> dict[int, int]:
    """The counts of this model; UnreadableError where the file is damaged or another model's, FileNotFoundError."""
    text = _read(path)
    header, _, body = text.partition("\n")
    if header != _header(model, vocab_size, body):
        of_model = header.startswith(f"{_TITLE} model {model} ")
        raise UnreadableError(f"{path} is damaged." if of_model else f"{path} holds no counts of this model.")
    return _entries(path, body, vocab_size)


def write_kept_counts(path: Path, kept: KeptCounts) -> None:
    """Replaces the file as a whole. Raises OSError."""
    body = _body(kept.counts)
    _write(path, f"{_header(kept.model, kept.vocab_size, body)}\n{body}")


def write_token_list(path: Path, counts: Mapping[int, int]) -> None:
    """Writes tokens with their counts, in this order. Raises OSError."""
    _write(path, f"# token id, times it was said\n{_body(counts)}")


def _header(model: str, vocab_size: int, body: str) -> str:
    return f"{_TITLE} model {model} vocabulary {vocab_size} crc32 {zlib.crc32(body.encode()):08x}"


def _body(counts: Mapping[int, int]) -> str:
    return "".join(f"{token_id} {count}\n" for token_id, count in counts.items())


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnreadableError(f"{path} is too large for a list of tokens.")
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeError:
        raise UnreadableError(f"{path} is no list of tokens: it takes one `id` or `id count` a line.") from None


def _entries(path: Path, text: str, vocab_size: int) -> dict[int, int]:
    """Counts by id, 0 where there is none."""
    counts: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or not all(word.isdecimal() for word in words):
            raise UnreadableError(f"{path}, line {number}: {line[:80]!r} is neither `id` nor `id count`.")
        token_id, count = int(words[0]), int(words[1]) if len(words) == 2 else 0
        if token_id >= vocab_size or count > _MAX_COUNT:
            raise UnreadableError(f"{path}, line {number}: {line[:80]!r} is beyond the {vocab_size:,} tokens.")
        if token_id in counts:
            raise UnreadableError(f"{path}, line {number}: token {token_id} is listed twice.")
        counts[token_id] = count
    return counts


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
