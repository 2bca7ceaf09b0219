"""Counts as people write them: 32k is 32,000 and 32K is 32,768, as vLLM reads them; 200G, 1.5M."""

import re
from collections.abc import Sequence

__all__ = ["COUNT_HELP", "COUNT_OPTIONS", "read_count", "read_counts"]

COUNT_OPTIONS = frozenset(
    {
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--kv-cache-memory-bytes",
        "--prefix-disk-bytes",
        "--responses-bytes",
    }
)
COUNT_HELP = "It takes a whole number, such as 32768, 32K (32,768) or 32k (32,000); M, G and T too."
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def read_count(text: str) -> str:
    """The number in digits; what is no such number as it is, for the option's own check."""
    match = _COUNT.fullmatch(text.strip())
    if not match:
        return text
    base = 1000 if match[2].islower() else 1024
    return str(int(float(match[1]) * base ** _POWERS[match[2].lower()]))


def read_counts(words: Sequence[str]) -> list[str]:
    """The words of a command line with the values of these options in digits."""
    counted: list[str] = []
    for word in words:
        flag, has_value, value = word.partition("=")
        if counted and counted[-1] in COUNT_OPTIONS:
            word = read_count(word)
        elif has_value and flag in COUNT_OPTIONS:
            word = f"{flag}={read_count(value)}"
        counted.append(word)
    return counted
