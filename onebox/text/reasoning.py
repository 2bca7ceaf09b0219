"""Tells an answer's reasoning from its content, as the text streams by.

Qwen3.5's template opens <think> in the prompt, so the model's own text begins inside and only </think> shows up in it.
"""

from typing import NamedTuple

__all__ = ["ReasoningSplitter", "Split", "begins_in_reasoning"]

_OPEN, _CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    reasoning: str
    content: str


def begins_in_reasoning(prompt: str) -> bool:
    """Whether the answer to this prompt starts inside a <think> block that the prompt opened."""
    return prompt.rstrip().endswith(_OPEN)


class ReasoningSplitter:
    """Text in, (reasoning, content) out. The line breaks around </think> belong to neither."""

    def __init__(self, *, in_reasoning: bool) -> None:
        self._in_reasoning = in_reasoning
        self._skips_line_breaks = False
        self._held = ""

    def push(self, text: str) -> Split:
        if not self._in_reasoning:
            return Split("", self._content(text))
        text = self._held + text
        reasoning, mark, content = text.partition(_CLOSE)
        if mark:
            self._in_reasoning, self._skips_line_breaks, self._held = False, True, ""
            return Split(reasoning.rstrip("\n"), self._content(content))
        keep = _undecided(text)
        self._held = text[keep:]
        return Split(text[:keep], "")

    def flush(self) -> Split:
        """What waited for a mark that did not come."""
        held, self._held = self._held, ""
        return Split(held, "")

    def _content(self, text: str) -> str:
        if self._skips_line_breaks:
            text = text.lstrip("\n")
            self._skips_line_breaks = not text
        return text


def _undecided(text: str) -> int:
    """Where the end of text begins that may be line breaks and the start of the closing mark."""
    end = len(text)
    for length in range(min(len(_CLOSE) - 1, len(text)), 0, -1):
        if _CLOSE.startswith(text[-length:]):
            end -= length
            break
    return len(text[:end].rstrip("\n"))
