"""What a request asks of its answer's form: a plain value that crosses process boundaries.

Creating one checks its bounds and nothing else. Whether an answer can match it is found out by a `GrammarCompiler`: the
grammar library sees a client's text in the checker's process first.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from onebox.engine.grammar.bounds import check_choices, check_lark, check_regex, check_schema, check_text
from onebox.spec.errors import UsageError

__all__ = ["Grammar", "GrammarError", "GrammarKind"]

_JSON_WHITESPACE = r"[ \n\r\t]{1,64}"
"""Enough for a deep indent; unbounded, a model can write whitespace until its token limit."""


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    CFG = "cfg"

    @property
    def noun(self) -> str:
        """What a client calls it."""
        names = {"json_schema": "JSON schema", "choice": "list of choices", "cfg": "grammar"}
        return names.get(self, str(self))


class GrammarError(UsageError):
    """A grammar cannot be used; `field_name` is the client's own name for it, where it has one."""

    def __init__(self, message: str, field_name: str = "") -> None:
        super().__init__(message)
        self.field_name = field_name


@dataclass(frozen=True)
class Grammar:
    """What a whole answer must match. Refused when created, if it is malformed or beyond the bounds."""

    kind: GrammarKind
    text: str
    """JSON of the schema or of the list of choices, the regex, or the Lark grammar; empty for json_object."""
    field_name: str = field(default="", compare=False)
    """The request's field that asked for it, for refusals."""
    parts: tuple["Grammar", ...] = field(default=(), compare=False)
    """The grammars of which this one is composed: a refusal is about the part that is at fault."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise UsageError(f"The {self.kind.noun} must be a text; this one is {_brief(self.text)}.")
        check_text(self.text, self.kind.noun)
        match self.kind:
            case GrammarKind.REGEX:
                check_regex(self.text)
            case GrammarKind.CFG if not self.parts:
                check_lark(self.text)

    @cached_property
    def key(self) -> bytes:
        """Equal for grammars that compile to the same and are refused with the same error."""
        parts = b"".join(part.key for part in self.parts)
        return hashlib.sha256(f"{self.kind} {self.field_name}\n{self.text}".encode() + parts).digest()

    @property
    def rules(self) -> str:
        """The same grammar in Lark's notation; inside `%lark { }` it is a part of a larger one."""
        match self.kind:
            case GrammarKind.CFG:
                return self.text
            case GrammarKind.REGEX:
                return f"start: /{_between_slashes(self.text)}/"
            case GrammarKind.CHOICE:
                # One terminal: as alternatives of a rule, each would be an item of the parser in every step.
                return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(self.text))
            case GrammarKind.JSON_SCHEMA:
                return _json_rules(json.loads(self.text))
            case GrammarKind.JSON_OBJECT:
                return _json_rules({"type": "object"})

    def named(self, field_name: str) -> "Grammar":
        """The same, as the given field of a request asked for it."""
        return replace(self, field_name=field_name)

    @classmethod
    def json_schema(cls, schema: dict[str, Any]) -> "Grammar":
        """A document that the schema accepts, its properties in the schema's order."""
        if not isinstance(schema, dict):
            raise UsageError(f"A JSON schema must be an object; this one is {_brief(schema)}.")
        if "x-guidance" in schema:
            raise UsageError("The JSON schema holds x-guidance, settings of the grammar library; remove them.")
        grammar = cls(GrammarKind.JSON_SCHEMA, _json(schema, "JSON schema"))
        check_schema(schema)
        return grammar

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, "")

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that the pattern matches from end to end. Classes are Unicode's; no look-around, no back-references."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of these texts."""
        if not choices:
            raise UsageError("The list of choices is empty; give at least one.")
        check_choices(len(choices))
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise UsageError(f"Each choice must be a text of at least one character; one is {_brief(choice)}.")
            check_text(choice, "list of choices")
        return cls(GrammarKind.CHOICE, _json(list(choices), "list of choices"))

    @classmethod
    def cfg(cls, lark: str, parts: tuple["Grammar", ...] = ()) -> "Grammar":
        """Text of a context-free grammar in Lark's notation, from its rule `start`; it cannot name control tokens.

        One that is composed of others names them in `parts`.
        """
        return cls(GrammarKind.CFG, lark, parts=parts)


def _json_rules(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _JSON_WHITESPACE}})


def _between_slashes(pattern: str) -> str:
    """A regex as Lark writes it between two slashes: no bare slash or line break inside."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    written, is_escaped = [], False
    for character in pattern:
        if character in escapes:
            # Behind a backslash they mean themselves, too.
            written.append(escapes[character])
        elif is_escaped:
            written.append("\\" + character)
        elif character != "\\":
            written.append(character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(written)


def _json(value: object, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The {name} cannot be written as JSON ({error}).") from None


def _brief(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
