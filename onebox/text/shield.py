"""Keeps a client's text text: whatever it spells, it never becomes a control token of the prompt.

In the client's strings, and in them alone, each character with which a control token begins or ends is replaced by a
stand-in before the template is rendered. A stand-in is half of a surrogate pair, which no valid text contains. A
control token that is found in the rendered text is then the template's own, however strings were joined, cut or trimmed
on the way; what lies between two of them is ordinary text, encoded after its stand-ins have been turned back.

A template that looks for a mark in a client's string does not find it. `chat.py` says what follows from that.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onebox.spec.errors import UsageError

__all__ = ["Shield", "refuse_half_characters"]

_FIRST_STAND_IN = 0xDC00
_HALF = re.compile("[\ud800-\udfff]")


def refuse_half_characters(text: str) -> None:
    """JSON can spell half of a surrogate pair."""
    if not text.isascii() and (found := _HALF.search(text)):
        raise UsageError(f"The text holds U+{ord(found[0]):04X} by itself, which is no character.")


class Shield:
    """For the control tokens of one tokenizer, all that it recognizes in text: special ones, and such as <think>."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        names = sorted(control_tokens, key=len, reverse=True)
        edges = sorted({edge for name in names for edge in (name[0], name[-1])})
        self._stand_ins = {edge: chr(_FIRST_STAND_IN + place) for place, edge in enumerate(edges)}
        # The longest first, as the tokenizer library matches them. Without control tokens nothing is found.
        self._control = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def cover(self, value: Any) -> Any:
        """A client's value, all strings in it covered, names of members too. Half a character is refused."""
        if isinstance(value, str):
            return self._cover_text(value)
        if isinstance(value, Mapping):
            return {self.cover(key): self.cover(held) for key, held in value.items()}
        return [self.cover(held) for held in value] if isinstance(value, list | tuple) else value

    def uncover(self, text: str) -> str:
        """The text with its stand-ins turned back."""
        if not text.isascii():
            for edge, stand_in in self._stand_ins.items():
                text = text.replace(stand_in, edge)
        return text

    def split(self, text: str) -> Iterator[tuple[str, str]]:
        """Pairs of the text up to a control token and that token, "" behind the last one; stand-ins stay."""
        at = 0
        for found in self._control.finditer(text):
            yield text[at : found.start()], found[0]
            at = found.end()
        yield text[at:], ""

    def is_spelled_in(self, text: str) -> bool:
        """Whether the text, stand-ins turned back, spells a control token."""
        return self._control.search(text) is not None

    def _cover_text(self, text: str) -> str:
        refuse_half_characters(text)
        for edge, stand_in in self._stand_ins.items():
            text = text.replace(edge, stand_in)
        return text
