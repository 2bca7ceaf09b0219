"""An answer's deltas as sections, one after the other: reasoning, content, or one call of a tool.

Chat completions have a field for each kind; the Responses and the Messages API have a list in the order of what was
said. Both write their lists from here, streamed and whole, so the two agree.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from onebox.text.parser import Content, Delta, Reasoning
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart

__all__ = ["AnswerSection", "AnswerSections", "SectionClosed", "SectionEvent", "SectionGrown", "SectionOpened"]


@dataclass
class AnswerSection:
    """`text` is what has come so far: of a call, the JSON of its arguments."""

    index: int
    kind: Literal["reasoning", "content", "call"]
    name: str = ""
    """Of the tool that is called."""
    text: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    """What makes the section's ids unlike any other's."""


@dataclass(frozen=True)
class SectionOpened:
    section: AnswerSection


@dataclass(frozen=True)
class SectionGrown:
    section: AnswerSection
    text: str


@dataclass(frozen=True)
class SectionClosed:
    section: AnswerSection


SectionEvent = SectionOpened | SectionGrown | SectionClosed


class AnswerSections:
    """At most one section is open at a time, the last one."""

    def __init__(self) -> None:
        self.all: list[AnswerSection] = []
        self._is_open = False

    def add(self, deltas: Iterable[Delta]) -> None:
        """Adds deltas whose events are not needed."""
        for _ in self.push(deltas):
            pass

    def push(self, deltas: Iterable[Delta]) -> Iterator[SectionEvent]:
        """To be read to the end: `all` grows on the way."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield from self._write("reasoning", text)
                case Content(text):
                    yield from self._write("content", text)
                case ToolCallStart(_, name):
                    yield from self._open("call", name)
                case ToolCallArguments(_, text):
                    yield from self._grow(text)

    def close(self) -> Iterator[SectionEvent]:
        """The end of the answer."""
        if self._is_open:
            self._is_open = False
            yield SectionClosed(self.all[-1])

    def _write(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[SectionEvent]:
        if not (self._is_open and self.all[-1].kind == kind):
            yield from self._open(kind)
        yield from self._grow(text)

    def _open(self, kind: Literal["reasoning", "content", "call"], name: str = "") -> Iterator[SectionEvent]:
        yield from self.close()
        self._is_open = True
        self.all.append(AnswerSection(len(self.all), kind, name))
        yield SectionOpened(self.all[-1])

    def _grow(self, text: str) -> Iterator[SectionEvent]:
        self.all[-1].text += text
        yield SectionGrown(self.all[-1], text)
