"""An answer's deltas as a list of sections in order: reasoning, content, or one tool call.

Chat completions have a field for each kind; the Responses and the Messages API have a list in the model's order. Both
APIs write their lists from these sections, streamed and whole, so the two agree.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from onebox.text.parser import Content, Delta, Reasoning
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart

__all__ = ["AnswerSection", "AnswerSections", "SectionEvent"]


@dataclass
class AnswerSection:
    """`text` is what has come so far; of a call, the JSON of its arguments."""

    index: int
    kind: Literal["reasoning", "content", "call"]
    name: str = ""
    """The called tool's."""
    parts: list[str] = field(default_factory=list)
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    """Random; the section's ids are made of it."""

    @property
    def text(self) -> str:
        # Joined where it is read, at a section's end: joined at every part, long answers would take quadratic time.
        return "".join(self.parts)


class SectionEvent(NamedTuple):
    """How a section changed; `text` is what it grew by."""

    change: Literal["opened", "grown", "closed"]
    section: AnswerSection
    text: str = ""


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
            yield SectionEvent("closed", self.all[-1])

    def _write(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[SectionEvent]:
        if not (self._is_open and self.all[-1].kind == kind):
            yield from self._open(kind)
        yield from self._grow(text)

    def _open(self, kind: Literal["reasoning", "content", "call"], name: str = "") -> Iterator[SectionEvent]:
        yield from self.close()
        self._is_open = True
        self.all.append(AnswerSection(len(self.all), kind, name))
        yield SectionEvent("opened", self.all[-1])

    def _grow(self, text: str) -> Iterator[SectionEvent]:
        self.all[-1].parts.append(text)
        yield SectionEvent("grown", self.all[-1], text)
