"""Reads marks such as </think> in text that is still arriving.

A mark for which the tokenizer has a token is that token, and not the text that spells it: a model that quotes
<tool_call> in prose calls nothing. The token comes as one character, a stand-in, half of a surrogate pair, which no
other text contains. Where a tokenizer has no such token, the mark is its spelling.

Where the text so far does not decide whether a mark follows, the reader raises Undecided, and the caller tries again
with more text. So the result does not depend on how the text was split.
"""

import re

__all__ = [
    "MARKS",
    "MAX_NAME_CHARS",
    "STAND_INS",
    "MarkReader",
    "Undecided",
    "is_name",
    "with_spellings",
    "with_stand_ins",
]

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Those that may be tokens. Others, such as <function=, are always text."""
STAND_INS = {mark: chr(0xDC80 + place) for place, mark in enumerate(MARKS)}
_SPELLINGS = {stand_in: mark for mark, stand_in in STAND_INS.items()}
_ANY = "".join(_SPELLINGS)

_NEXT = re.compile(f"[<{_ANY}]")
# Bounded, so that endless white space or an endless name is not read again at every step.
_SPACE = re.compile(r"\s{0,1000}")
MAX_NAME_CHARS = 256
_NAME = re.compile(rf"([^<>\n{_ANY}]{{0,{MAX_NAME_CHARS}}})(.?)", re.DOTALL)


def with_stand_ins(text: str) -> str:
    """The text with each mark in it as a token would come."""
    for mark, stand_in in STAND_INS.items():
        text = text.replace(mark, stand_in)
    return text


def with_spellings(text: str) -> str:
    """The text that a reader sees: marks that came as tokens by their names."""
    if not text.isascii():
        for stand_in, mark in _SPELLINGS.items():
            text = text.replace(stand_in, mark)
    return text


def is_name(text: str) -> bool:
    """Whether `take_name` would read the text as a name, unchanged."""
    match = _NAME.fullmatch(text)
    return match is not None and not match[2] and bool(text) and text == text.strip()


class Undecided(Exception):  # noqa: N818 (it is no error)
    """The text ends inside a possible mark."""


class MarkReader:
    """A position in a text. `is_last`: no more text follows, so that everything is decided.

    `spelled` are the marks that count where they are spelled out; the others only as tokens. What is taken as text
    has no stand-ins.
    """

    def __init__(self, text: str, *, is_last: bool, spelled: frozenset[str] = frozenset(MARKS)) -> None:
        self.text = text
        self.is_last = is_last
        self.spelled = spelled
        self.at = 0

    @property
    def is_done(self) -> bool:
        return self.at == len(self.text)

    def take_plain(self) -> str:
        """The text up to the next "<" or mark, which may be none."""
        found = _NEXT.search(self.text, self.at)
        start, self.at = self.at, found.start() if found else len(self.text)
        return self.text[start : self.at]

    def take_one(self) -> str:
        """The next character, or the next mark by its name."""
        self.at += 1
        char = self.text[self.at - 1]
        return _SPELLINGS.get(char, char)

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def takes(self, mark: str) -> bool:
        """Consumes the mark if it is next."""
        if self._takes_text(STAND_INS.get(mark, mark)):
            return True
        return mark in STAND_INS and mark in self.spelled and self._takes_text(mark)

    def takes_any(self, *marks: str) -> bool:
        return any(self.takes(mark) for mark in marks)

    def take_name(self, mark: str) -> str:
        """Consumes `<function=NAME>`, where the mark is `<function=`, and returns the name; "" if it is not next."""
        start = self.at
        if self.takes(mark) and (match := _NAME.match(self.text, self.at)):
            name, end = match[1].strip(), match[2]
            if not end and not self.is_last:
                raise Undecided
            if name and end == ">":
                self.at = match.end()
                return name
        self.at = start
        return ""

    def _takes_text(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        rest = len(self.text) - self.at
        if not self.is_last and rest < len(text) and self.text.endswith(text[:rest]):
            raise Undecided
        return False
