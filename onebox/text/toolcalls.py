"""Tool calls in Qwen3.5's XML form, parsed while they stream, to the JSON of their arguments.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Nothing in a value is escaped, so a closing mark ends a value only where the form can continue after it: a value may
contain text that looks like marks. Models omit closing marks; a value then ends where the next part of the form begins.
Where </tool_call> is a token, the end of a call in a value's text, however it is spelled, is text unless that token
follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onebox.text.arguments import ArgumentTypes, argument_json, json_of, parse_json
from onebox.text.marks import MarkReader

__all__ = ["ToolCallArguments", "ToolCallReader", "ToolCallStart", "ToolDefinition", "without_cut_mark"]

_OPENS = ("<tool_call>", "<function=")
_MARKS = ("</parameter>", "</function>", "</tool_call>", "</think>", "<parameter=", *_OPENS)


@dataclass(frozen=True)
class ToolDefinition:
    """A function that may be called; `parameters` is the JSON schema of its arguments.

    The schema is read when this is made, so away from the event loop, on which answers are parsed.
    """

    name: str
    parameters: dict[str, Any]
    types: ArgumentTypes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", ArgumentTypes(self.parameters))


@dataclass(frozen=True)
class ToolCallStart:
    """The model has written a call's name.

    `index` counts an answer's calls from 0.
    """

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """Part of the JSON of a call's arguments.

    All parts of one call joined are json.dumps(arguments, ensure_ascii=False), with the default separators.
    """

    index: int
    text: str


class ToolCallReader:
    """Parses one call from behind `<function=NAME>` on.

    Once it is closed, `stray` is the text between parameters that belongs to none of them.
    """

    def __init__(self, index: int, tool: ToolDefinition) -> None:
        self.index = index
        self.is_open = True
        self.stray = ""
        self._types = tool.types
        self._keys: set[str] = set()
        self._key = ""
        self._value: _Text | _Typed | None = None

    def read(self, reader: MarkReader) -> Sequence[ToolCallArguments]:
        """Takes one step. Sets `is_open` to False where the call ends."""
        if self._value:
            return self._read_value(reader, self._value)
        if plain := reader.take_plain():
            self.stray += plain
        elif key := reader.take_name("<parameter="):
            return self._emit(self._begin_value(key))
        elif _takes_end(reader):
            self.is_open = False
        else:
            self.stray += reader.take_one()
        return []

    def close(self) -> Sequence[ToolCallArguments]:
        """Ends the call with the arguments read so far."""
        self.is_open = False
        text = self._end_value(self._value) if self._value else ""
        self.stray = self.stray.strip()
        if self._keys:
            return self._emit(text + "}")
        # A model may write its arguments as one JSON object instead of parameters.
        arguments = parse_json(self.stray)
        if isinstance(arguments, dict):
            self.stray = ""
            return self._emit(json_of(arguments))
        return self._emit("{}")

    def _read_value(self, reader: MarkReader, value: "_Text | _Typed") -> Sequence[ToolCallArguments]:
        if plain := reader.take_plain():
            return self._emit(value.push(plain))
        if self._takes_value_end(reader):
            return self._emit(self._end_value(value))
        return self._emit(value.push(reader.take_one()))

    def _takes_value_end(self, reader: MarkReader) -> bool:
        """Whether the value ends here; consumes </parameter> and leaves any other mark for the next step."""
        start = reader.at
        if reader.takes("</parameter>"):
            behind = reader.at
            ends = _continues(reader, "<parameter=", "</tool_call>", "</think>", *_opens(reader)) or (
                reader.takes("</function>") and (_is_spelled(reader) or _closes(reader))
            )
            reader.at = behind if ends else start
            return ends
        if reader.takes("</function>"):
            ends = _closes(reader)
        elif reader.takes("</tool_call>"):
            ends = _continues(reader, "<tool_call>")
        else:
            key = reader.take_name("<parameter=")
            ends = key in self._types and key != self._key and key not in self._keys
        reader.at = start
        return ends

    def _begin_value(self, key: str) -> str:
        self._key = key
        types = self._types.of(key)
        if types == {"string"} and key not in self._keys:
            self._value = _Text()
            return self._lead() + '"'
        self._value = _Typed(types)
        return ""

    def _end_value(self, value: "_Text | _Typed") -> str:
        self._value = None
        text = value.end()
        if isinstance(value, _Text):
            return text
        # What was emitted cannot be taken back: of a parameter given twice, the first value counts.
        return self._lead() + text if text and self._key not in self._keys else ""

    def _lead(self) -> str:
        lead = (", " if self._keys else "{") + json_of(self._key) + ": "
        self._keys.add(self._key)
        return lead

    def _emit(self, text: str) -> Sequence[ToolCallArguments]:
        return [ToolCallArguments(self.index, text)] if text else []


class _Text:
    """A string value, emitted as it comes, without the form's line break at either end."""

    def __init__(self) -> None:
        self._is_begun = False
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._is_begun:
            self._is_begun, text = True, text.removeprefix("\n")
        shown = text.removesuffix("\n")
        self._held = text[len(shown) :]
        return json_of(shown)[1:-1]

    def end(self) -> str:
        return '"'


class _Typed:
    """A value whose JSON is known only at its end."""

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._parts: list[str] = []

    def push(self, text: str) -> str:
        self._parts.append(text)
        return ""

    def end(self) -> str:
        text = "".join(self._parts).removeprefix("\n").removesuffix("\n")
        return argument_json(text, self._types)


def without_cut_mark(text: str) -> str:
    """The text of a truncated call, without an incomplete mark at its end."""
    start = text.rfind("<")
    tail = text[start:]
    is_cut = any(mark.startswith(tail) and mark != tail for mark in _MARKS)
    is_cut_name = tail.startswith("<parameter=") and ">" not in tail
    return text[:start] if start >= 0 and (is_cut or is_cut_name) else text


def _takes_end(reader: MarkReader) -> bool:
    """Whether the call ends here; consumes its closing marks, but no mark that opens something else."""
    if reader.takes("</function>"):
        behind = reader.at
        reader.skip_space()
        if not reader.takes("</tool_call>"):
            reader.at = behind
        return True
    start = reader.at
    if reader.takes_any("</think>", *_opens(reader)):
        reader.at = start
        return True
    return reader.takes("</tool_call>")


def _closes(reader: MarkReader) -> bool:
    """Whether what follows </function> shows that it is the form's."""
    return _continues(reader, "</tool_call>", *_opens(reader)) or (
        not _is_spelled(reader) and _continues(reader, "</think>")
    )


def _opens(reader: MarkReader) -> tuple[str, ...]:
    """The marks with which a call may begin."""
    return _OPENS if _is_spelled(reader) else ("<tool_call>",)


def _is_spelled(reader: MarkReader) -> bool:
    """Whether the form is text alone, so that nothing in it is certain."""
    return "</tool_call>" in reader.spelled


def _continues(reader: MarkReader, *marks: str) -> bool:
    """Whether one of the marks, or the end of the answer, comes next after white space."""
    reader.skip_space()
    return (reader.is_last and reader.is_done) or reader.takes_any(*marks)
