"""A member as the simulation knows it: what its steps take, as a file.

    {"decode_s": {"1": 0.021, "4": 0.027}, "tokens_per_step": 2.1, "prompt_base_s": 0.01, "prompt_token_s": 0.0008,
     "request_s": 0.004, "max_num_seqs": 8, "chunk_tokens": 2048, "cache_tokens": 400000}

`decode_s` is the time of a decode step by the number of streams, straight between and beyond what was measured. A step
with prompt tokens takes `prompt_base_s` + `prompt_token_s` each longer. `request_s` is what a request takes
beside steps. `measure.py` measures them.

Servers that share a machine slow each other down. `slowdowns` has for so many of them computing at once how much longer
a step's decode and prompt parts take than alone: {"2": [1.3, 1.2], "3": [2.0, 1.8]} for a machine with three servers.
"""

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onebox.spec.errors import UnreadableError, UsageError, WriteError

__all__ = ["StepTimes", "read_step_times", "write_step_times"]

_PAGE_TOKENS = 64


@dataclass(frozen=True)
class StepTimes:
    """Times in seconds; lengths in tokens."""

    decode_s: dict[int, float]
    tokens_per_step: float = 1.0
    """Of one stream: more than 1 where drafts are accepted."""
    prompt_base_s: float = 0.0
    prompt_token_s: float = 0.0
    request_s: float = 0.0
    max_num_seqs: int = 8
    chunk_tokens: int = 2048
    """Prompt tokens of one step, at most."""
    cache_tokens: int = 100_000
    """That prefixes may hold."""
    answer_wait_s: float | None = 0.05
    """How long running answers may wait for a step with prompts; None: as long as it takes, as on a CPU."""
    slowdowns: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(decode, prompts): factors on a step's parts by the number of servers of one machine that compute at once.

    As many as the largest number share a machine; where it is empty, each has its own.
    """
    prompt_ratios: tuple[float, ...] = ()
    """Measured waits for prompts by what these times say: a step with prompts draws one of them as its factor."""

    def __post_init__(self) -> None:
        if not self.decode_s or min(self.decode_s) < 1 or not _are_above_0(self.decode_s.values()):
            raise UsageError("decode_s must have the seconds of a step for at least one number of streams.")
        if not _are_above_0((self.tokens_per_step, self.max_num_seqs, self.chunk_tokens)):
            raise UsageError("tokens_per_step, max_num_seqs and chunk_tokens must be above 0.")
        if not all(0 <= value < math.inf for value in (self.prompt_base_s, self.prompt_token_s, self.request_s)):
            raise UsageError("prompt_base_s, prompt_token_s and request_s must be 0 or more.")
        if not _are_above_0((*self.prompt_ratios, *itertools.chain(*self.slowdowns.values()))):
            raise UsageError("slowdowns and prompt_ratios must be above 0.")

    def decode_step_s(self, num_rows: int) -> float:
        """Of a decode step of so many streams."""
        return _between(self.decode_s, num_rows)

    @property
    def num_sharing(self) -> int:
        """Servers on one machine."""
        return max(self.slowdowns, default=1)

    def prompt_room(self, num_rows: int) -> int:
        """Prompt tokens of a step beside so many running answers, as the engine paces them: in whole pages."""
        if not num_rows or not self.prompt_token_s or self.answer_wait_s is None:
            return self.chunk_tokens
        fixed_s = self.decode_step_s(num_rows) + self.prompt_base_s
        tokens = max(self.answer_wait_s - fixed_s, fixed_s) / self.prompt_token_s
        return min(self.chunk_tokens, max(1, round(tokens / _PAGE_TOKENS)) * _PAGE_TOKENS)

    def step_s(self, num_rows: int, prompt_tokens: int, num_busy: int = 1) -> float:
        """Of a step with decode rows, prompt tokens, or both, where so many servers of the machine compute."""
        decode = self.decode_step_s(num_rows) if num_rows else 0.0
        prompt = self.prompt_base_s + self.prompt_token_s * prompt_tokens if prompt_tokens else 0.0
        if num_busy == 1 or not self.slowdowns:
            return decode + prompt
        factors = [
            _between({1: 1.0, **{n: pair[part] for n, pair in self.slowdowns.items()}}, num_busy) for part in (0, 1)
        ]
        return decode * factors[0] + prompt * factors[1]


def _are_above_0(values: Iterable[float]) -> bool:
    return all(0 < value < math.inf for value in values)


def _between(known: dict[int, float], count: int) -> float:
    """Straight between two values, and beyond the last two; the first one below."""
    numbers = sorted(known)
    if len(numbers) == 1 or count <= numbers[0]:
        return known[numbers[0]]
    after = next((place for place, number in enumerate(numbers) if number >= count), len(numbers) - 1)
    few, many = numbers[after - 1], numbers[after]
    return max(known[numbers[0]], known[few] + (known[many] - known[few]) * (count - few) / (many - few))


def read_step_times(path: Path) -> StepTimes:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return StepTimes(**content | _parsed(content))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableError(
            f"{path} does not describe step times ({error}); measure them with --measure URL."
        ) from None


def write_step_times(times: StepTimes, path: Path) -> None:
    try:
        path.write_text(json.dumps(asdict(times), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise WriteError(f"{path} cannot be written ({error.strerror}).") from None


def _parsed(content: dict[str, Any]) -> dict[str, Any]:
    """What JSON has no form for: numbers as keys, tuples."""
    slowdowns = {int(count): (float(pair[0]), float(pair[1])) for count, pair in content.get("slowdowns", {}).items()}
    return {
        "decode_s": {int(rows): float(seconds) for rows, seconds in content["decode_s"].items()},
        "slowdowns": slowdowns,
        "prompt_ratios": tuple(map(float, content.get("prompt_ratios", ()))),
    }
