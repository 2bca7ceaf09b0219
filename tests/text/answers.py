"""Answers put together from their deltas, for the tests of parsing."""

import json
from typing import NamedTuple

from hypothesis import strategies as st

from onebox.text.parser import AnswerParser, Content, Reasoning
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart, ToolDefinition

WEATHER = ToolDefinition(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "place": {"type": "object"},
        },
    },
)


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    """Names, and the JSON of the arguments."""


def parse(pieces, *, in_reasoning=False, tools=(WEATHER,), **options):
    """The answer whose text comes in these pieces."""
    parser = AnswerParser(in_reasoning=in_reasoning, tools=tools, **options)
    return put_together([delta for piece in pieces for delta in parser.push(piece)] + parser.flush())


def put_together(deltas):
    parsed = Parsed("", "", [])
    for delta in deltas:
        match delta:
            case Reasoning(text):
                parsed = parsed._replace(reasoning=parsed.reasoning + text)
            case Content(text):
                parsed = parsed._replace(content=parsed.content + text)
            case ToolCallStart(index, name):
                assert index == len(parsed.calls)
                parsed.calls.append((name, ""))
            case ToolCallArguments(index, text):
                # Calls come one after the other.
                assert index == len(parsed.calls) - 1
                parsed.calls[index] = (parsed.calls[index][0], parsed.calls[index][1] + text)
        assert isinstance(delta, ToolCallStart) or delta.text
    for _, arguments in parsed.calls:
        assert json.dumps(json.loads(arguments), ensure_ascii=False) == arguments
        assert isinstance(json.loads(arguments), dict)
    return parsed


def call(name="weather", /, **parameters):
    """A call as the model writes it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


# What answers are made of, whole and in halves, so that texts built from it go wrong in many ways.
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=weather>", "<function=other>", "<function=", "</function>"),
        *(
            "<parameter=city>",
            "<parameter=days>",
            "<parameter=place>",
            "<parameter=x y>",
            "<parameter=",
            "</parameter>",
        ),
        *(
            "<think>",
            "</think>",
            "<tool_",
            "</para",
            "</",
            "<",
            ">",
            "\n",
            "\n\n",
            " ",
            "7",
            '{"a": [1',
            "]}",
            '"',
            "\\",
        ),
        *("true", "null", "word", "é🙂", "\x00", call(city="Rome", days=3), call("other", a="1")),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=25).map("".join)
