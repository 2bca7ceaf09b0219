"""Calibration text: files of text or of conversations, cut into sequences of tokens by a seed.

A .jsonl file holds one JSON object a line: a text, a conversation, or a recorded request with its response.

    {"text": "..."}
    {"messages": [...], "tools": [...]}                       tools may be absent
    {"request": {"messages": [...]}, "response": {"choices": [{"message": {...}}]}}

Any other file is text. Files are indexed first and then read passage by passage in an order drawn by the seed, so that
a file may be larger than memory.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.quantize.settings import CalibrationSettings
from onebox.spec.errors import UnreadableError, UsageError
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer

__all__ = ["CalibrationText", "CalibrationTokens", "index_files"]

_PASSAGE_BYTES = 8 << 10
"""Text is cut into passages of about so many bytes, at the ends of lines."""
_END = "<|endoftext|>"
_PICTURES = ("image", "video")


class _Passage(NamedTuple):
    path: Path
    begin: int
    nbytes: int


@dataclass(frozen=True)
class CalibrationTokens:
    """Token ids int64 [sequences, tokens], of which the last `num_held_out` sequences are not tuned on."""

    token_ids: Tensor
    num_held_out: int
    num_left_out: int
    """Conversations that were left out because they have pictures."""

    @property
    def num_tuned_on(self) -> int:
        """Sequences."""
        return len(self.token_ids) - self.num_held_out


@dataclass(frozen=True)
class CalibrationText:
    """Indexed files: the passages of all of them, and the sha256 of each file."""

    passages: list[_Passage] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def tokens(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, settings: CalibrationSettings
    ) -> CalibrationTokens:
        """The sequences, of passages in an order drawn by the seed, joined by end-of-text tokens.

        Without a `template` conversations are refused. There are fewer sequences where the files have less text; then
        at most an eighth of them is held out.
        """
        order = list(self.passages)
        Random(settings.seed).shuffle(order)  # noqa: S311 - an order, nothing secret
        end = tokenizer.encode(_END)
        wanted = settings.num_sequences + settings.num_held_out
        ids: list[int] = []
        num_left_out = 0
        for passage in order:
            text = _text_of(passage, template)
            if text is None:
                num_left_out += 1
                continue
            ids += [*tokenizer.encode(text), *end]
            if len(ids) >= wanted * settings.sequence_tokens:
                break
        count = min(wanted, len(ids) // settings.sequence_tokens)
        if not count:
            raise UsageError(
                f"The calibration text has {len(ids):,} tokens, less than one sequence of "
                f"{settings.sequence_tokens:,}: give more text with --data, or a smaller --sequence-tokens."
            )
        used = torch.tensor(ids[: count * settings.sequence_tokens])
        num_held_out = settings.num_held_out if count == wanted else min(settings.num_held_out, count // 8)
        return CalibrationTokens(used.reshape(count, settings.sequence_tokens), num_held_out, num_left_out)


def index_files(paths: Sequence[Path]) -> CalibrationText:
    """The passages of all files, which are read once."""
    text = CalibrationText()
    for path in paths:
        digest = hashlib.sha256()
        for begin, raw in _pieces(path):
            digest.update(raw)
            if raw.strip():
                text.passages.append(_Passage(path, begin, len(raw)))
        text.digests[path.name if path.name not in text.digests else str(path)] = digest.hexdigest()
    return text


def _pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """(begin, bytes) of a file's lines if it is JSON Lines, else of its passages."""
    is_lines = path.suffix == ".jsonl"
    begin, piece = 0, bytearray()
    try:
        with path.open("rb") as file:
            while line := file.readline(-1 if is_lines else _PASSAGE_BYTES):
                piece += line
                if is_lines or len(piece) >= _PASSAGE_BYTES:
                    yield begin, bytes(piece)
                    begin += len(piece)
                    piece.clear()
    except OSError as error:
        raise UnreadableError(f"The calibration text {path} cannot be read: {error.strerror}.") from None
    if piece:
        yield begin, bytes(piece)


def _text_of(passage: _Passage, template: ChatTemplate | None) -> str | None:
    """The text of a passage; None for a conversation with pictures."""
    with passage.path.open("rb") as file:
        file.seek(passage.begin)
        raw = file.read(passage.nbytes)
    if passage.path.suffix != ".jsonl":
        # A passage may begin or end inside a character where a line is longer than a passage.
        return raw.decode("utf-8", errors="ignore")
    try:
        return _line_text(json.loads(raw), template)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UnreadableError(
            f"The line at byte {passage.begin:,} of {passage.path} is neither a text nor a conversation "
            f"({type(error).__name__}: {error}): a line is an object with text, messages, or request and response."
        ) from None


def _line_text(value: dict[str, Any], template: ChatTemplate | None) -> str | None:
    if "text" in value:
        text: str = value["text"]
        if not isinstance(text, str):
            raise TypeError("text is no string")
        return text
    asked = value.get("request", value)
    messages = [*asked["messages"]]
    if "response" in value:
        messages.append(value["response"]["choices"][0]["message"])
    if template is None:
        raise UsageError("The calibration text has conversations, and the base has no chat template to render them by.")
    if any(_has_picture(message) for message in messages):
        return None
    return template.render(messages, tools=asked.get("tools") or ())


def _has_picture(message: dict[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(str(part.get("type", "")).startswith(_PICTURES) for part in parts)
