"""Reads marks such as </think> in text that is still arriving.

Where the text so far does not decide whether a mark follows, the reader raises Undecided, and the caller tries again
with more text. So the result does not depend on how the text was split.
"""

import re

__all__ = ["MAX_NAME_CHARS", "MarkReader", "Undecided", "is_name"]

# Bounded, so that endless white space or an endless name is not read again at every step.
_SPACE = re.compile(r"\s{0,1000}")
MAX_NAME_CHARS = 256
_NAME = re.compile(rf"([^<>\n]{{0,{MAX_NAME_CHARS}}})(.?)", re.DOTALL)


def is_name(text: str) -> bool:
    """Whether `take_name` would read the text as a name, unchanged."""
    match = _NAME.fullmatch(text)
    return match is not None and not match[2] and bool(text) and text == text.strip()


class Undecided(Exception):  # noqa: N818 (it is no error)
    """The text ends inside a possible mark."""


class MarkReader:
    """A position in a text. `is_last`: no more text follows, so that everything is decided."""

    def __init__(self, text: str, *, is_last: bool) -> None:
        self.text = text
        self.is_last = is_last
        self.at = 0

    @property
    def is_done(self) -> bool:
        return self.at == len(self.text)

    def take_plain(self) -> str:
        """The text up to the next "<", which may be none."""
        end = self.text.find("<", self.at)
        start, self.at = self.at, len(self.text) if end < 0 else end
        return self.text[start : self.at]

    def take_one(self) -> str:
        self.at += 1
        return self.text[self.at - 1]

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def takes(self, mark: str) -> bool:
        """Consumes the mark if it is next."""
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        rest = len(self.text) - self.at
        if not self.is_last and rest < len(mark) and self.text.endswith(mark[:rest]):
            raise Undecided
        return False

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
