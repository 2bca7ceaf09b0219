"""Grammars of answers: tool calls in the model's XML form, and reasoning before constrained content.

`onebox/text/toolcalls.py` parses the form that is defined here. A value follows its schema where the schema determines
how it is written; otherwise it is text up to its closing mark.
"""

import json
from collections.abc import Sequence
from typing import Any

from onebox.engine.api import Grammar
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
        f"answer: {_nested(grammar)}"
    )


def either(first: Grammar, second: Grammar) -> Grammar:
    """What one of the two allows."""
    return Grammar.cfg(f"start: {_nested(first)} | {_nested(second)}")


def tool_calls(tools: Sequence[ToolDefinition], *, is_one: bool) -> Grammar:
    """One or more calls of these tools and no other text; exactly one call where `is_one`."""
    rules = [f"start: call{'' if is_one else f' ({_LAYOUT} call)*'}"]
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        rules += _call_rules(f"call_{place}", tool)
    rules.append(f"text[suffix={_quoted(_VALUE_END)}]: /(?s:.*)/")
    rules.append(r'other: "<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">\n" text')
    return Grammar.cfg("\n".join(rules))


def _call_rules(name: str, tool: ToolDefinition) -> list[str]:
    """The rule of one tool's call, its parameters in the schema's order, and the rules of their values."""
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UsageError(f"The parameters of the tool {tool.name!r} are no JSON schema of an object.")
    parts, rules = [], []
    for place, (key, schema) in enumerate(properties.items()):
        opening = _quoted(f"<parameter={key}>\n")
        parts.append(f"{name}_{place}" + ("" if key in required else "?"))
        rules.append(f"{name}_{place}: {opening} {_value(schema, tool)}")
    if not properties and tool.parameters.get("additionalProperties"):
        parts.append("other*")
    opening, closing = _quoted(f"<tool_call>\n<function={tool.name}>\n"), _quoted("</function>\n</tool_call>")
    return [" ".join([f"{name}:", opening, *parts, closing]), *rules]


def _value(schema: Any, tool: ToolDefinition) -> str:
    """The rule of one value with its end."""
    end = _quoted(_VALUE_END)
    if not isinstance(schema, dict):
        return "text"
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts):
        return f"({' | '.join(_quoted(text) for text in texts)}) {end}"
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if not all(isinstance(name, str) and name in _JSON_TYPES for name in types):
        return "text"
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    # Compiled separately first, so that an invalid schema is refused with its own message.
    return f"{_nested(Grammar.json_schema({**definitions, **schema}))} {end}"


def _nested(grammar: Grammar) -> str:
    return f"%lark {{\n{grammar.rules}\n}}"


def _quoted(text: str) -> str:
    return json.dumps(text)
