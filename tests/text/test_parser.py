"""An answer's parts are told apart, and how its text was cut changes nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.text.arguments import parse_json
from onebox.text.marks import with_spellings, with_stand_ins
from onebox.text.parser import AnswerParser, Content, Reasoning, begins_in_reasoning
from onebox.text.stream import Detokenizer
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart, ToolDefinition
from tests.text.answers import FRAGMENTS, TEXTS, WEATHER, Parsed, call, parse, put_together
from tests.text.hostile import CONTROL

ROME, ROME_ARGUMENTS = call(city="Rome", days=3), '{"city": "Rome", "days": 3}'
ROME_CALL = ("weather", ROME_ARGUMENTS)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("thought\n</think>\n\nanswer\n", "thought", "answer\n"),
        ("thought without an end\n", "thought without an end\n", ""),
        ("</think>", "", ""),
        ("a < b </thin\n\n</think>x</think>y", "a < b </thin", "x</think>y"),
        ("half a mark </thi", "half a mark </thi", ""),
        ("<think>\nsaid twice</think>x", "said twice", "x"),
    ],
)
def test_reasoning_ends_at_its_mark_whose_line_breaks_vanish(text, reasoning, content):
    for pieces in ([text], text):
        assert parse(pieces, in_reasoning=True) == Parsed(reasoning, content, [])


def test_a_model_that_opens_its_reasoning_itself_is_understood():
    assert parse(["\n<think>\na\n</think>\n\nb"]) == Parsed("a", "b", [])
    assert parse(["So <think>\na\n</think>"]) == Parsed("", "So <think>\na\n</think>", [])


@given(st.lists(FRAGMENTS.filter(lambda fragment: fragment != "<think>")).map("".join))
def test_without_tools_and_thinking_all_text_is_content(text):
    assert parse(text, tools=()) == Parsed("", text, [])


def test_calls_stand_after_reasoning_and_content():
    text = f"hm\n</think>\n\nLet me see.\n\n{ROME}\n{call(city='Oslo')}"
    expected = [ROME_CALL, ("weather", '{"city": "Oslo"}')]
    assert parse([text], in_reasoning=True) == Parsed("hm", "Let me see.", expected)


def test_text_on_both_sides_of_a_call_is_content():
    assert parse([f"Before.\n{ROME}\nAfter.\n"]) == Parsed("", "Before.\n\nAfter.\n", [ROME_CALL])
    assert parse([f"\n\n{ROME}\n\n"]) == Parsed("", "", [ROME_CALL])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"so\n{ROME}", Parsed("so", "", [ROME_CALL])),
        (f"so\n{ROME}\nand then\n</think>\n\nDone.", Parsed("so\n\nand then", "Done.", [ROME_CALL])),
        (f"so\n{ROME}\n</think>\n\n{ROME}", Parsed("so", "", [ROME_CALL, ROME_CALL])),
        # The call was left open when the reasoning ended.
        (f"{ROME.partition('</function>')[0]}</think>\n\nNo.", Parsed("", "No.", [ROME_CALL])),
        ("so\n<tool_call>\n<function=weather>\n</think>\n\nNo.", Parsed("so", "No.", [("weather", "{}")])),
    ],
)
def test_a_call_inside_reasoning_is_a_call_and_the_reasoning_goes_on(text, expected):
    for pieces in ([text], text):
        assert parse(pieces, in_reasoning=True) == expected


def test_a_mark_that_is_only_mentioned_is_text():
    text = 'the rule says "a <tool_call> block after </tool_call>, with <function=weather> in it"'
    assert parse([f"{text}\n</think>\n\n{text}"], in_reasoning=True) == Parsed(text, text, [])


def test_what_looks_like_a_call_is_content_where_no_tools_are_offered():
    assert parse([ROME], tools=()) == Parsed("", ROME, [])


def test_a_call_without_its_wrapper_is_one_where_the_function_is_known():
    bare = "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>"
    assert parse([f"I look.\n{bare}\n{bare}"]).calls == [("weather", '{"days": 2}')] * 2
    unknown = bare.replace("weather", "unheard")
    assert parse([unknown]) == Parsed("", unknown, [])


def test_the_end_of_reasoning_in_a_value_does_not_end_reasoning():
    parsed = parse([f"so {call(city='</think>')}"], in_reasoning=True)
    assert parsed == Parsed("so ", "", [("weather", '{"city": "</think>"}')])


def test_deltas_come_as_soon_as_they_are_certain():
    parser = AnswerParser(in_reasoning=True, tools=[WEATHER])
    assert parser.push("so ") == [Reasoning("so ")]
    assert parser.push("a <") == [Reasoning("a ")]
    assert parser.push(" b\n") == [Reasoning("< b")]
    assert parser.in_reasoning
    assert parser.push("</think>\n\nI") == [Content("I")]
    assert not parser.in_reasoning
    assert parser.push("\n<tool_call>\n<function=weather>\n") == [ToolCallStart(0, "weather")]
    assert parser.push("<parameter=city>") == [ToolCallArguments(0, '{"city": "')]
    assert parser.push('\nR"o') == [ToolCallArguments(0, 'R\\"o')]
    assert parser.push("me\n</parameter>\n<parameter=days>\n1") == [ToolCallArguments(0, 'me"')]
    assert parser.push("2\n</parameter>\n</func") == []
    assert parser.push("tion>\n") == [ToolCallArguments(0, ', "days": 12')]
    assert parser.push("</tool_call>") == [ToolCallArguments(0, "}")]
    assert parser.flush() == []


@given(TEXTS, st.booleans(), st.booleans(), st.lists(st.integers(1, 30)))
def test_the_parts_do_not_depend_on_the_cuts(text, in_reasoning, has_tools, lengths):
    pieces, start = [], 0
    for length in lengths:
        pieces.append(text[start : start + length])
        start += length
    pieces.append(text[start:])
    options = {"in_reasoning": in_reasoning, "tools": [WEATHER] if has_tools else []}
    whole = parse([text], **options)
    assert parse(pieces, **options) == whole
    assert parse(text, **options) == whole


@given(TEXTS, st.booleans(), st.lists(st.integers(1, 9)))
def test_the_parts_do_not_depend_on_how_tokens_split_characters(tokenizer, text, in_reasoning, lengths):
    # The tokenizer has a token for each byte, so every longer character is split.
    token_ids, start = tokenizer.encode(text), 0
    stream, parser = Detokenizer(tokenizer), AnswerParser(in_reasoning=in_reasoning, tools=[WEATHER])
    deltas = []
    for length in [*lengths, len(token_ids)]:
        deltas += parser.push(stream.push(token_ids[start : start + length]))
        start += length
    deltas += parser.push(stream.flush()) + parser.flush()
    assert put_together(deltas) == parse([text], in_reasoning=in_reasoning)


# Where marks are tokens.

TOKENS_ONLY = frozenset()
MARKED = st.lists(FRAGMENTS | FRAGMENTS.map(with_stand_ins), max_size=25).map("".join)
"""The same fragments, their marks spelled out or as tokens."""


@given(MARKED, st.booleans(), st.booleans(), st.booleans(), st.lists(st.integers(1, 30)))
def test_the_parts_do_not_depend_on_the_cuts_where_marks_are_tokens(text, in_reasoning, has_tools, is_held, lengths):
    tools = [WEATHER] if has_tools else []
    options = {"in_reasoning": in_reasoning, "tools": tools, "spelled": TOKENS_ONLY, "is_constrained": is_held}
    whole = parse([text], **options)
    pieces, start = [], 0
    for length in [*lengths, len(text)]:
        pieces.append(text[start : start + length])
        start += length
    assert parse(pieces, **options) == whole
    assert parse(text, **options) == whole
    assert with_spellings(str(whole)) == str(whole)


@given(TEXTS, st.booleans())
def test_marks_that_are_spelled_out_are_text_where_they_are_tokens(text, in_reasoning):
    parsed = parse(text, in_reasoning=in_reasoning, spelled=TOKENS_ONLY)
    assert parsed == (Parsed(text, "", []) if in_reasoning else Parsed("", text, []))


@pytest.mark.parametrize(
    "quoted",
    [
        f'{{"text": "{ROME}"}}',
        f"It is written so:\n{ROME}\n",
        "\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "</think>\n\n",
    ],
)
def test_a_call_in_ordinary_tokens_is_text(tokenizer, quoted):
    """As a model quotes it in prose or in JSON: spelled in the tokens of ordinary text."""
    spelled = tokenizer.encode_rendered(tokenizer.shield.cover(quoted))
    assert not set(spelled) & set(tokenizer.mark_ids)
    for token_ids, calls in ((spelled, []), ((*spelled, *tokenizer.encode(ROME)), [ROME_CALL])):
        stream = Detokenizer(tokenizer, has_marks=True)
        pieces = [stream.push([token_id]) for token_id in token_ids]
        parsed = parse(pieces, spelled=tokenizer.spelled_marks)
        assert (parsed.content.strip("\n"), parsed.calls) == (quoted.strip("\n"), calls)


def test_a_call_spelled_in_a_value_is_part_of_the_value():
    # One parameter: a second one in the quoted call cannot be told from one of the call's own.
    value = f"Write {call(city='Rome')} and go on.\n</parameter>\n</function>\n</tool_call>\nDone."
    text = with_stand_ins("<tool_call>") + call("other", text=value)[len("<tool_call>") : -len("</tool_call>")]
    parsed = parse([text + with_stand_ins("</tool_call>")], spelled=TOKENS_ONLY)
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [("other", {"text": value})]


def test_under_a_grammar_calls_may_be_spelled_where_it_has_them():
    options = {"spelled": TOKENS_ONLY, "is_constrained": True}
    assert parse([f"hm\n</think>\n\n{ROME}\n{ROME}"], in_reasoning=True, **options) == Parsed("hm", "", [ROME_CALL] * 2)
    quoted = f'{{"text": "{ROME}"}}'
    assert parse([quoted], **options) == Parsed("", quoted, [])
    assert parse([f"so {ROME}"], in_reasoning=True, **options) == Parsed(f"so {ROME}", "", [])


@given(MARKED, st.booleans())
def test_a_call_that_is_cut_off_has_no_valid_arguments(text, in_reasoning):
    parser = AnswerParser(in_reasoning=in_reasoning, tools=[WEATHER], spelled=TOKENS_ONLY)
    deltas = parser.push(text) + parser.flush(is_cut=True)
    calls = {delta.index: "" for delta in deltas if isinstance(delta, ToolCallStart)}
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            calls[delta.index] += delta.text
    complete = [place for place, arguments in calls.items() if parse_json(arguments) is not None]
    assert len(complete) == parser.num_calls >= len(calls) - parser.is_call_cut
    assert complete == list(range(parser.num_calls))


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
# Each by itself cannot be mistaken for the end of a value, wherever in it it stands.
MARKS = st.sampled_from(
    ["", "<", "</parameter>", "</function>", "</tool_call>", "<tool_call>", "<parameter=x>", "</think>"]
)
STRINGS = st.tuples(PLAIN, MARKS, PLAIN).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PLAIN, st.lists
)
VALUES = {
    "string": STRINGS,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(JSON, max_size=3),
    "object": st.dictionaries(PLAIN, JSON, max_size=3),
}
TYPED = ToolDefinition(
    "typed", {"properties": {name: {"type": [name, "null"]} for name in VALUES} | {"text": {"type": "string"}}}
)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={name: values | st.none() for name, values in VALUES.items()} | {"text": STRINGS}
)


@given(PLAIN, PLAIN, st.lists(ARGUMENTS, max_size=3))
def test_what_the_template_writes_of_an_answer_is_read_back(template, reasoning, content, calls):
    calls = [{name: value for name, value in call.items() if value not in ("null", "None")} for call in calls]
    tool_calls = [{"function": {"name": "typed", "arguments": json.dumps(arguments)}} for arguments in calls]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}
    text = template.render([{"role": "user", "content": "?"}, answer], tools=[{"type": "function"}])
    opening, closing = "<|im_start|>assistant\n<think>\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    written = text.partition(opening)[2].removesuffix(closing)
    parsed = parse([written], in_reasoning=True, tools=[TYPED])
    assert parsed[:2] == (reasoning.strip(), content.strip())
    assert [json.loads(arguments) for _, arguments in parsed.calls] == calls


QUOTED = st.lists(
    st.sampled_from(
        ["a", "\n", "<", *CONTROL, call(city="Rome"), "</parameter>", "</function>", "<function=typed>", "é"]
    )
).map("".join)


@given(QUOTED, QUOTED, QUOTED)
def test_what_the_template_writes_of_hostile_text_is_read_back_by_its_tokens(
    template, tokenizer, reasoning, content, value
):
    call = {"function": {"name": "typed", "arguments": {"text": value, "integer": 5}}}
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [call]}
    messages = [{"role": "user", "content": "?"}, answer]
    token_ids = tokenizer.encode_rendered(template.render(messages, shield=tokenizer.shield))
    opening, closing = (tokenizer.encode(f"{text}assistant\n<think>\n") for text in ("<|im_start|>", "\n<|im_start|>"))
    start = token_ids.index(opening[0], 1) + len(opening)
    stream = Detokenizer(tokenizer, has_marks=True)
    pieces = [stream.push([token_id]) for token_id in token_ids[start : -len(closing) - 1]]
    parsed = parse(pieces, in_reasoning=True, tools=[TYPED], spelled=tokenizer.spelled_marks)
    assert parsed.reasoning.strip() == reasoning.strip()
    assert parsed.content.strip() == content.strip()
    assert [json.loads(arguments) for _, arguments in parsed.calls] == [{"text": value, "integer": 5}]


def test_the_prompt_shows_whether_the_answer_begins_in_reasoning(template):
    user = {"role": "user", "content": "What does <think> mean? <think>"}
    assert begins_in_reasoning(template.render([user]))
    assert not begins_in_reasoning(template.render([user], {"enable_thinking": False}))
