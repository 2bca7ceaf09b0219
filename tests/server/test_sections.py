"""Sections do not depend on how an answer was cut, and their events build what they hold."""

from hypothesis import given
from hypothesis import strategies as st

from onebox.server.sections import AnswerSections
from onebox.text.parser import AnswerParser
from onebox.text.toolcalls import ToolDefinition
from tests.server.endpoints.test_chat import ANSWERS

WEATHER = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [ToolDefinition("get_weather", WEATHER), ToolDefinition("ping", {})]


def read(pieces):
    """The sections, and the events on the way there."""
    parser, sections, events = AnswerParser(in_reasoning=True, tools=TOOLS), AnswerSections(), []
    for piece in pieces:
        events += sections.push(parser.push(piece))
    events += [*sections.push(parser.flush()), *sections.close()]
    return [(section.kind, section.name, section.text) for section in sections.all], events


@given(st.sampled_from([*ANSWERS.values()]), st.data())
def test_sections_are_the_same_at_every_cut(text, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, _ = read([text])
    cut, events = read(pieces)
    assert cut == whole
    built, is_open = [], False
    for change, section, text in events:
        match change:
            case "opened":
                assert not is_open
                assert section.index == len(built)
                built.append("")
                is_open = True
            case "grown":
                assert is_open
                built[section.index] += text
            case "closed":
                is_open = False
    assert not is_open
    assert built == [text for _, _, text in whole]


def test_what_is_said_around_a_call_keeps_its_order():
    sections, _ = read([ANSWERS["inside reasoning"]])
    assert [kind for kind, _, _ in sections] == ["reasoning", "call", "reasoning", "content"]
    assert sections[1] == ("call", "ping", "{}")
