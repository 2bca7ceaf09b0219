"""Grammars of answers: tool calls in the model's XML form, and reasoning before constrained content.

`onebox/text/toolcalls.py` parses the form that is defined here. A value follows its schema where the schema determines
how it is written; otherwise it is text up to its closing mark.
"""

import json
from collections.abc import Sequence
from typing import Any

from onebox.engine.api import MAX_GRAMMAR_BYTES, Grammar
from onebox.spec.errors import UsageError
from onebox.text.toolcalls import ToolDefinition

__all__ = ["after_reasoning", "either", "tool_calls"]

_REASONING_END = "</think>"
_VALUE_END = "\n</parameter>\n"
_LAYOUT = r"/\n{0,2}/"
"""Line breaks between two parts of an answer."""
_JSON_TYPES = {"integer", "number", "boolean", "null", "object", "array"}
"""Types whose values are written as JSON; strings are written without quotes."""
_DEFINITIONS = ("$defs", "definitions")
"""Where a schema keeps the definitions that its parts refer to."""


def after_reasoning(grammar: Grammar) -> Grammar:
    """Any text up to </think>, then what the grammar allows."""
    return Grammar.cfg(
        f"start: reasoning {_LAYOUT} answer\n"
        f"reasoning[suffix={_quoted(_REASONING_END)}]: /(?s:.*)/\n"
        f"answer: {_nested(grammar)}",
        parts=(grammar,),
    ).named(grammar.field_name)


def either(first: Grammar, second: Grammar) -> Grammar:
    """What one of the two allows."""
    return Grammar.cfg(f"start: {_nested(first)} | {_nested(second)}", parts=(first, second)).named(second.field_name)


def tool_calls(tools: Sequence[ToolDefinition], *, is_one: bool) -> Grammar:
    """One or more calls of these tools and no other text; exactly one call where `is_one`."""
    calls = _CallRules()
    for place, tool in enumerate(tools):
        calls.add_tool(f"call_{place}", tool)
    start = f"start: call{'' if is_one else f' ({_LAYOUT} call)*'}"
    either_call = "call: " + " | ".join(f"call_{place}" for place in range(len(tools)))
    text = f"text[suffix={_quoted(_VALUE_END)}]: /(?s:.*)/"
    other = r'other: "<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">\n" text'
    rules = "\n".join([start, either_call, *calls.rules, text, other])
    return Grammar.cfg(rules, parts=tuple(calls.schemas)).named("tools")


class _CallRules:
    """The rules of the tools' calls. Refused as soon as they are too long, before more of them are written."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self.schemas: list[Grammar] = []
        self._num_characters = 0

    def add_tool(self, name: str, tool: ToolDefinition) -> None:
        """The rule of one tool's call, its parameters in the schema's order, and the rules of their values."""
        properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise UsageError(f"The parameters of the tool {tool.name!r} are no JSON schema of an object.")
        needed = {key for key in required if isinstance(key, str)}
        parts = []
        for place, (key, schema) in enumerate(properties.items()):
            parts.append(f"{name}_{place}" + ("" if key in needed else "?"))
            self._add_value(f"{name}_{place}", _quoted(f"<parameter={key}>\n"), schema, tool)
        if not properties and tool.parameters.get("additionalProperties"):
            parts.append("other*")
        opening, closing = _quoted(f"<tool_call>\n<function={tool.name}>\n"), _quoted("</function>\n</tool_call>")
        self._add(" ".join([f"{name}:", opening, *parts, closing]))

    def _add_value(self, name: str, opening: str, schema: Any, tool: ToolDefinition) -> None:
        """The rule of one value with its opening and its end."""
        end, texts = _quoted(_VALUE_END), _texts(schema)
        if texts:
            # One terminal: as alternatives of a rule, each would be an item of the parser in every step.
            self._add(f"{name.upper()}: {' | '.join(map(_quoted, texts))}")
            self._add(f"{name}: {opening} {name.upper()} {end}")
        elif _is_json(schema):
            definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
            value = Grammar.json_schema({**definitions, **schema}).named("tools")
            self.schemas.append(value)
            self._add(f"{name}: {opening} {_nested(value)} {end}")
        else:
            self._add(f"{name}: {opening} text")

    def _add(self, rule: str) -> None:
        self.rules.append(rule)
        self._num_characters += len(rule)
        if self._num_characters > MAX_GRAMMAR_BYTES:
            limit = f"{MAX_GRAMMAR_BYTES} bytes are allowed for the grammar of their calls"
            raise UsageError(f"The tools' schemas are too long in all: at most {limit}.")


def _texts(schema: Any) -> list[str]:
    """The texts that are a value's only ones, if its schema says so."""
    if not isinstance(schema, dict):
        return []
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    is_text = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    return texts if is_text and texts else []


def _is_json(schema: Any) -> bool:
    """Whether the schema says that a value is no plain text."""
    types = schema.get("type") if isinstance(schema, dict) else None
    types = types if isinstance(types, list) else [types]
    return all(isinstance(name, str) and name in _JSON_TYPES for name in types)


def _nested(grammar: Grammar) -> str:
    return f"%lark {{\n{grammar.rules}\n}}"


def _quoted(text: str) -> str:
    return json.dumps(text)
