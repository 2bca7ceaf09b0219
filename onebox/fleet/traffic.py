"""Requests for the simulation: of real traces, or of the bench's mixes by so many users.

A trace is a file of JSON lines or a CSV. Known forms:

- ours: {"at": seconds, "prompt_tokens": n, "answer_tokens": n, "session": "name"}, the session optional: a session's
  prompt begins with the one before it and its answer
- Mooncake's: {"timestamp": milliseconds, "input_length": n, "output_length": n, "hash_ids": [...]}, each id one block
  of 512 tokens, equal ids equal prefixes
- Azure's LLM inference traces: a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens
"""

import csv
import itertools
import json
import math
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from onebox.bench.load import MIXES, mix_lengths
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["BLOCK_TOKENS", "Turn", "UserTraffic", "read_trace"]

BLOCK_TOKENS = 64
"""Prefixes are shared in blocks of so many tokens."""
_MOONCAKE_TOKENS = 512


@dataclass(frozen=True)
class Turn:
    """One request. `blocks` name its prompt's beginning: equal names at equal places are equal text."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[Hashable, ...] = ()
    session: Hashable = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.answer_tokens < 0 or not math.isfinite(self.at_s):
            raise ValueError(f"a request at {self.at_s} of {self.prompt_tokens} and {self.answer_tokens} tokens")


@dataclass(frozen=True)
class UserTraffic:
    """Users of a mix, each with one request at a time, as the bench's clients, and a pause between two."""

    mix: str
    num_users: int
    think_s: float = 0.0
    """Mean of the pauses, which are exponential; 0: none."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mix not in MIXES:
            raise UsageError(f"There is no mix {self.mix!r}; there are {', '.join(MIXES)}.")
        if self.num_users < 1:
            raise UsageError("There must be at least one user.")

    def user(self, number: int) -> Iterator[tuple[float, Turn]]:
        """(pause before it, the request) for ever. Times of the requests are not known here, and 0."""
        draw = random.Random(f"{self.seed} {number}")  # noqa: S311 - repeatable, not secret
        lanes = mix_lengths(self.mix)
        lane = lanes[number % len(lanes)]
        for count in itertools.count():
            session = (number, count)
            if self.mix == "agent":
                yield from ((self._pause(draw), turn) for turn in conversation(session, lane))
            else:
                prompt, answer = lane[count % len(lane)]
                yield self._pause(draw), Turn(0.0, prompt, answer, _blocks(session, prompt), session)

    def _pause(self, draw: random.Random) -> float:
        return draw.expovariate(1 / self.think_s) if self.think_s else 0.0


def conversation(session: Hashable, lane: Sequence[tuple[int, int]]) -> Iterator[Turn]:
    """Turns whose prompts grow: each is the one before, its answer, and something new."""
    for prompt, answer in lane:
        yield Turn(0.0, prompt, answer, _blocks(session, prompt), session)


def _blocks(session: Hashable, num_tokens: int) -> tuple[Hashable, ...]:
    return tuple((session, place) for place in range(num_tokens // BLOCK_TOKENS))


def read_trace(path: Path) -> list[Turn]:
    """In the order of arrival, from 0 on."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read as a trace ({error}).") from None
    try:
        turns = list(_csv_turns(text) if text.upper().startswith("TIMESTAMP") else _json_turns(text))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path} is no trace that is known ({error}); docs/scaleout.md has the forms.") from None
    if not turns:
        raise UnreadableError(f"{path} has no requests.")
    turns.sort(key=lambda turn: turn.at_s)
    first = turns[0].at_s
    return [Turn(each.at_s - first, *_rest(each)) for each in turns]


def _rest(turn: Turn) -> tuple[int, int, tuple[Hashable, ...], Hashable]:
    return turn.prompt_tokens, turn.answer_tokens, turn.blocks, turn.session


def _json_turns(text: str) -> Iterator[Turn]:
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        row: dict[str, Any] = json.loads(line)
        if "hash_ids" in row:
            parts = _MOONCAKE_TOKENS // BLOCK_TOKENS
            blocks = tuple((name, part) for name in row["hash_ids"] for part in range(parts))
            length = int(row["input_length"])
            blocks = blocks[: length // BLOCK_TOKENS]
            yield Turn(
                row["timestamp"] / 1000, length, int(row["output_length"]), blocks, blocks[0] if blocks else number
            )
        else:
            session, length = row.get("session", number), int(row["prompt_tokens"])
            yield Turn(float(row["at"]), length, int(row["answer_tokens"]), _blocks(session, length), session)


def _csv_turns(text: str) -> Iterator[Turn]:
    for number, row in enumerate(csv.DictReader(text.splitlines())):
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
        length = int(row["ContextTokens"])
        yield Turn(moment.timestamp(), length, int(row["GeneratedTokens"]), _blocks(number, length), number)
