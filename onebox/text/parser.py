"""Splits an answer's text into deltas while it streams: reasoning, content, tool calls.

Qwen3.5's template opens <think> in the prompt, so the answer starts inside the reasoning and only </think> appears in
it. A tool call is recognized anywhere, inside the reasoning too; the reasoning then continues until </think>. A mark
that is only mentioned, such as <tool_call> without a function after it, is text, and so is one that is spelled out
where the tokenizer has a token for it (`marks.py`). The joined deltas do not depend on how the text was split into
chunks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from onebox.text.marks import MARKS, STAND_INS, MarkReader, Undecided, with_spellings
from onebox.text.toolcalls import ToolCallArguments, ToolCallReader, ToolCallStart, ToolDefinition, without_cut_mark

__all__ = [
    "AnswerParser",
    "Content",
    "Delta",
    "PlainTextParser",
    "Reasoning",
    "TextParser",
    "begins_in_reasoning",
]


@dataclass(frozen=True)
class Reasoning:
    """Text inside <think>.

    Calls inside it are deltas of their own.
    """

    text: str


@dataclass(frozen=True)
class Content:
    text: str


Delta = Reasoning | Content | ToolCallStart | ToolCallArguments


def begins_in_reasoning(prompt: str) -> bool:
    """Whether the prompt ends with an open <think>, so that the answer starts inside the reasoning."""
    return prompt.rstrip().endswith("<think>")


class TextParser(Protocol):
    """Text in as it arrives, deltas out; the joined deltas do not depend on how the text was split."""

    in_reasoning: bool
    """Whether the text so far ends inside reasoning."""
    num_calls: int
    """Complete ones."""
    is_call_cut: bool
    """The text was cut off inside a call, of which the arguments, if any, are no valid JSON."""

    def push(self, text: str) -> list[Delta]: ...
    def flush(self, *, is_cut: bool = False) -> list[Delta]: ...


class PlainTextParser:
    """All text is content: for endpoints without a chat template."""

    in_reasoning = False
    num_calls = 0
    is_call_cut = False

    def push(self, text: str) -> list[Delta]:
        return [Content(with_spellings(text))] if text else []

    def flush(self, *, is_cut: bool = False) -> list[Delta]:  # noqa: ARG002 - there are no calls
        return []


class AnswerParser:
    """The parser of chats.

    Without tools, text that looks like a call is content. Line breaks next to </think> and around calls are layout and
    belong to no delta.
    """

    def __init__(
        self,
        *,
        in_reasoning: bool,
        tools: Sequence[ToolDefinition] = (),
        spelled: frozenset[str] = frozenset(MARKS),
        is_constrained: bool = False,
    ) -> None:
        """`spelled` are the marks that count as text, since they are no tokens.

        `is_constrained`: a grammar determines what follows the reasoning. It does not care how its marks are divided
        into tokens, so they also count spelled out where it has them: </think> at the end of the reasoning, calls
        before any content.
        """
        self.in_reasoning = in_reasoning
        self.num_calls = 0
        self.is_call_cut = False
        self._tools = {tool.name: tool for tool in tools}
        self._spelled = spelled
        self._is_constrained = is_constrained
        self._flows = {Reasoning: _Flow(Reasoning), Content: _Flow(Content)}
        self._call: ToolCallReader | None = None
        self._num_begun = 0
        self._is_start = True
        self._is_line_start = True
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        return _joined(self._read(MarkReader(self._held + text, is_last=False)))

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """What was held back. A call that the model left open is complete, unless the answer was cut off in it."""
        self.is_call_cut = is_cut and (self._call is not None or self._held.startswith(STAND_INS["<tool_call>"]))
        if self.is_call_cut:
            return []
        held = without_cut_mark(self._held) if self._call else self._held
        deltas = self._read(MarkReader(held, is_last=True))
        if self._call:
            deltas += self._end_call(self._call)
        for flow in self._flows.values():
            deltas += flow.flush()
        return _joined(deltas)

    def _read(self, reader: MarkReader) -> list[Delta]:
        deltas: list[Delta] = []
        while not reader.is_done:
            start, reader.spelled = reader.at, self._spelled_here()
            try:
                deltas += self._read_call(reader, self._call) if self._call else self._read_text(reader)
            except Undecided:
                reader.at = start
                break
        self._held = reader.text[reader.at :]
        return deltas

    def _spelled_here(self) -> frozenset[str]:
        """The marks that count here where they are spelled out."""
        if not self._is_constrained:
            return self._spelled
        if self._call:
            return frozenset(MARKS)
        if self.in_reasoning:
            return self._spelled | {"</think>"}
        return self._spelled if self._flows[Content].has_text else self._spelled | {"<tool_call>"}

    def _read_text(self, reader: MarkReader) -> Sequence[Delta]:
        if plain := reader.take_plain():
            return self._write(plain)
        if self.in_reasoning and reader.takes("</think>"):
            self._end_reasoning()
            return []
        if self._is_start and reader.takes("<think>"):
            self.in_reasoning, self._is_start = True, False
            self._flows[Reasoning].mark_edge()
            return []
        if self._tools and (name := self._take_call(reader)):
            self._call = ToolCallReader(self._num_begun, self._tools.get(name) or ToolDefinition(name, {}))
            self._num_begun += 1
            self._is_start = False
            return [ToolCallStart(self._call.index, name)]
        return self._write(reader.take_one())

    def _take_call(self, reader: MarkReader) -> str:
        """Consumes the opening of a call and returns the function's name; "" where there is no call.

        Where <tool_call> is no token, models that omit it are understood: a known function at the start of a line is a
        call then.
        """
        start = reader.at
        name = ""
        if reader.takes("<tool_call>"):
            reader.skip_space()
            name = reader.take_name("<function=")
        elif "<tool_call>" in self._spelled:
            name = reader.take_name("<function=")
            name = name if name in self._tools and self._is_line_start else ""
        if not name:
            reader.at = start
        return name

    def _read_call(self, reader: MarkReader, call: ToolCallReader) -> Sequence[Delta]:
        deltas: Sequence[Delta] = call.read(reader)
        return deltas if call.is_open else [*deltas, *self._end_call(call)]

    def _end_call(self, call: ToolCallReader) -> Sequence[Delta]:
        self._call = None
        self.num_calls += 1
        self._is_line_start = True
        deltas: list[Delta] = [*call.close()]
        for flow in self._flows.values():
            flow.mark_edge()
        # Text outside the call's form is part of the answer.
        return [*deltas, *self._write(call.stray)] if call.stray else deltas

    def _end_reasoning(self) -> None:
        self.in_reasoning, self._is_start, self._is_line_start = False, False, True
        for flow in self._flows.values():
            flow.mark_edge()

    def _write(self, text: str) -> Sequence[Delta]:
        self._is_line_start = text.endswith("\n")
        self._is_start = self._is_start and not text.strip("\n")
        return self._flows[Reasoning if self.in_reasoning else Content].write(text)


class _Flow:
    """The text of one kind. Line breaks are held back until it is known whether text of the same kind follows."""

    def __init__(self, kind: Callable[[str], Reasoning | Content]) -> None:
        self._kind = kind
        self._num_held = 0
        self.has_text = False
        self._is_edge = False

    def mark_edge(self) -> None:
        """A mark or a call is here: line breaks between it and the part's text are layout."""
        self._is_edge = True

    def write(self, text: str) -> Sequence[Delta]:
        shown = text.rstrip("\n")
        num_held, num_breaks = self._num_held, len(text) - len(shown)
        if not shown:
            self._num_held += num_breaks
            return []
        shown = "\n" * num_held + shown
        if self._is_edge and not self.has_text:
            shown = shown.lstrip("\n")
        self._num_held, self.has_text, self._is_edge = num_breaks, True, False
        return [self._kind(shown)]

    def flush(self) -> Sequence[Delta]:
        num_held, self._num_held = self._num_held, 0
        return [self._kind("\n" * num_held)] if num_held and not self._is_edge else []


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Adjacent deltas of one kind joined."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + delta.text)
        elif isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == delta.index:
            joined[-1] = ToolCallArguments(last.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined
