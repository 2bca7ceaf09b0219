"""A generated question with its right answer, and how a given answer is scored."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

__all__ = ["Example", "Generator", "answer_json", "call_text", "calls", "json_value", "score", "text_is"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A conversation that ends with a question, and its answer.

    `answer` is the text expected after the template's prompt, without <|im_end|>. With `thinking` it starts inside the
    <think> block that the prompt opened; without it the prompt has an empty <think> block.
    """

    messages: list[Json]
    tools: list[Json] | None
    answer: str
    check: Json
    thinking: bool = False

    @classmethod
    def ask(cls, question: str, content: str, check: Json, reasoning: str = "", **rest: Any) -> "Example":
        """A single question; with `reasoning` the answer thinks first. `rest` may have `system` and `tools`."""
        system = rest.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return cls.answered(messages, content, check, reasoning, rest.get("tools"))

    @classmethod
    def answered(
        cls, messages: list[Json], content: str, check: Json, reasoning: str = "", tools: list[Json] | None = None
    ) -> "Example":
        answer = f"{reasoning}\n</think>\n\n{content}" if reasoning else content
        return cls(messages, tools, answer, check, thinking=bool(reasoning))


Generator = Callable[[Random], Example]


def text_is(*values: str) -> Json:
    """A check that the answer is one of these texts."""
    return {"kind": "text", "values": list(values)}


def json_value(value: Any) -> Json:
    """A check that the answer is JSON with this value."""
    return {"kind": "json", "value": value}


def calls(*expected: tuple[str, Json]) -> Json:
    """A check that the answer calls these tools with these arguments, in this order."""
    return {"kind": "calls", "calls": [{"name": name, "arguments": arguments} for name, arguments in expected]}


def answer_json(value: Any, *, pretty: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2 if pretty else None)


def call_text(name: str, arguments: Json) -> str:
    """A tool call in the XML form, as the chat template renders it in the history."""
    parameters = "".join(f"<parameter={key}>\n{_value_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _value_text(value: Any) -> str:
    return answer_json(value) if isinstance(value, list | dict) else str(value)


def score(example: Example, answer: str) -> dict[str, float]:
    """Scores of an answer, each from 0 to 1. All checks have `exact`.

    JSON also has `valid` and `fields` (the share of right top-level fields), tool calls `well_formed` and `names`.
    """
    _, mark, content = answer.rpartition("</think>")
    if example.thinking and not mark:
        content = ""
    content = content.removesuffix("<|im_end|>").strip()
    return _SCORES[example.check["kind"]](example.check, content)


def _score_text(check: Json, content: str) -> dict[str, float]:
    return {"exact": float(content in check["values"])}


def _score_json(check: Json, content: str) -> dict[str, float]:
    try:
        value = json.loads(content)
    except ValueError:
        return {"exact": 0.0, "valid": 0.0, "fields": 0.0}
    expected = check["value"]
    if isinstance(expected, dict) and isinstance(value, dict):
        right = sum(key in value and _same(value[key], expected[key]) for key in expected)
        fields = right / max(1, len(expected.keys() | value.keys()))
    else:
        fields = float(_same(value, expected))
    return {"exact": float(_same(value, expected)), "valid": 1.0, "fields": fields}


def _same(value: Any, expected: Any) -> bool:
    """Equal as JSON values: 1 equals 1.0, and true is not a number."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(_same(value[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


_CALL = re.compile(
    r"<tool_call>\n<function=([^<>\n]+)>\n((?:<parameter=[^<>\n]+>\n.*?\n</parameter>\n)*)</function>\n</tool_call>",
    re.S,
)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n(.*?)\n</parameter>\n", re.S)


def _score_calls(check: Json, content: str) -> dict[str, float]:
    found = [(name, dict(_PARAMETER.findall(body))) for name, body in _CALL.findall(content)]
    expected = [(c["name"], {k: _value_text(v) for k, v in c["arguments"].items()}) for c in check["calls"]]
    rest = _CALL.sub("", content)
    return {
        "exact": float(found == expected),
        "well_formed": float(bool(found) and "<tool_call>" not in rest and "</tool_call>" not in rest),
        "names": float([name for name, _ in found] == [name for name, _ in expected]),
    }


_SCORES = {"text": _score_text, "json": _score_json, "calls": _score_calls}
