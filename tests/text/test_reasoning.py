"""Reasoning and content are told apart at </think>, in any cutting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.text.reasoning import ReasoningSplitter, begins_in_reasoning


def split(pieces, in_reasoning=True):
    splitter = ReasoningSplitter(in_reasoning=in_reasoning)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("thought\n</think>\n\nanswer\n", ("thought", "answer\n")),
        ("thought without an end\n", ("thought without an end\n", "")),
        ("</think>", ("", "")),
        ("a < b </thin\n\n</think>x</think>y", ("a < b </thin", "x</think>y")),
        ("half a mark </thi", ("half a mark </thi", "")),
    ],
)
def test_the_mark_divides_and_its_line_breaks_vanish(text, expected):
    assert split([text]) == expected
    assert split(text) == expected


@given(st.lists(st.sampled_from(["\n", "</think>", "</", "think>", "x", "<", ""])), st.booleans(), st.randoms())
def test_the_division_does_not_depend_on_the_cuts(tokens, in_reasoning, random):
    text, pieces = "".join(tokens), []
    start = 0
    while start < len(text):
        end = start + random.randint(1, 9)
        pieces.append(text[start:end])
        start = end
    assert split(pieces, in_reasoning) == split([text], in_reasoning)


def test_without_thinking_everything_is_content():
    assert split(["a</think>b\n"], in_reasoning=False) == ("", "a</think>b\n")


def test_the_prompt_tells_where_the_answer_begins():
    assert begins_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not begins_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
