"""What counts as a right answer."""

import json

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.eval.judge import folded, judge, schema_problem
from onebox.eval.question import GivenAnswer, Truth, TruthKind


def is_right(truth, text="", calls=()):
    return judge(truth, GivenAnswer(text, tuple(calls))).right


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bécs", True),
        ("Ausztria fővárosa **Bécs**.", True),
        ("BÉCS", True),
        ("Be\u0301cs", True),  # the accent as a character of its own
        ("Becs", False),
        ("Bécsi", False),
        ("", False),
    ],
)
def test_an_accent_counts_and_a_sentence_around_the_answer_does_not(text, expected):
    assert is_right(Truth(TruthKind.HOLDS, ["Bécs"], "hu"), text) is expected


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [("İSTANBUL", "tr", True), ("istanbul", "tr", True), ("ISTANBUL", "tr", False), ("Istanbul", "en", False)],
)
def test_turkish_capitals_follow_turkish_rules(text, language, expected):
    assert is_right(Truth(TruthKind.HOLDS, ["İstanbul"], language), text) is expected


def test_folding_keeps_the_two_letters_i_apart_in_turkish_only():
    assert folded("ILIK İNCE", "tr") == "ılık ince"
    assert folded("ILIK", "en") == "ilik"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ŐSZI TŰZ", True),
        ('"ŐSZI TŰZ".', False),
        ('"ŐSZI TŰZ"', True),
        ("ŐSZI TŰZ.", True),
        ("ÖSZI TÜZ", False),
        ("őszi tűz", False),
    ],
)
def test_a_text_must_come_back_letter_for_letter(text, expected):
    assert is_right(Truth(TruthKind.TEXT, ["ŐSZI TŰZ"], "hu"), text) is expected


INVOICE = {"vendor": "Tóth Kft.", "total": 12.5}
SCHEMA = {
    "type": "object",
    "properties": {"vendor": {"type": "string"}, "total": {"type": "number"}},
    "required": ["vendor", "total"],
    "additionalProperties": False,
}


def test_json_is_scored_by_its_fields():
    truth = Truth(TruthKind.JSON, INVOICE)
    found = judge(truth, GivenAnswer(json.dumps({"vendor": "Tóth", "total": 12.50})))
    assert (found.right, found.scores) == (False, {"valid": 1.0, "fields": 0.5})
    assert "vendor" in found.why
    assert judge(truth, GivenAnswer("not JSON")).scores == {"valid": 0.0, "fields": 0.0}
    assert is_right(truth, json.dumps(INVOICE))
    assert not is_right(truth, json.dumps({**INVOICE, "more": 1}))
    assert not is_right(truth, json.dumps([INVOICE]))


def test_a_fence_is_forgiven_only_where_no_schema_was_given():
    fenced = f"```json\n{json.dumps(INVOICE)}\n```"
    assert is_right(Truth(TruthKind.JSON, INVOICE), fenced)
    assert not is_right(Truth(TruthKind.JSON, INVOICE, schema=SCHEMA), fenced)


@pytest.mark.parametrize("value", [True, "12.5", None, [12.5]])
def test_a_value_of_another_type_is_another_value(value):
    truth = Truth(TruthKind.JSON, INVOICE, schema=SCHEMA)
    found = judge(truth, GivenAnswer(json.dumps({**INVOICE, "total": value})))
    assert not found.right
    assert found.scores["follows_schema"] == 0.0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(["EUR", "USD", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["vendor", "items", "currency"]), inner)
    ),
    max_leaves=6,
)
SCHEMAS = [
    {"type": "number"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "string", "enum": ["EUR", "USD"]},
    {"type": "array", "items": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"vendor": {"type": "string"}, "items": {"type": "array", "items": {"type": "number"}}},
        "required": ["vendor"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"currency": {"enum": ["EUR", 1]}}},
]


@given(value=VALUES, schema=st.sampled_from(SCHEMAS))
def test_our_reading_of_a_schema_is_that_of_jsonschema(value, schema):
    assert (schema_problem(value, schema) is None) is jsonschema_rs.is_valid(schema, value)


TIMER = {"name": "set_timer", "arguments": {"minutes": 5}}
CLOCK = {"name": "get_time", "arguments": {"city": "Győr"}}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([TIMER, CLOCK], True),
        ([CLOCK, TIMER], True),
        ([TIMER], False),
        ([TIMER, CLOCK, CLOCK], False),
        ([TIMER, {"name": "get_time", "arguments": {"city": "Gyor"}}], False),
        ([{"name": "set_timer", "arguments": {"minutes": "5"}}, CLOCK], False),
        ([{"name": "set_timer", "arguments": "{broken"}, CLOCK], False),
    ],
)
def test_calls_must_be_the_same_ones_in_any_order(made, expected):
    assert is_right(Truth(TruthKind.CALLS, [TIMER, CLOCK]), calls=made) is expected


TRUTHS = [
    Truth(TruthKind.HOLDS, ["Bécs"], "hu"),
    Truth(TruthKind.TEXT, ["ILIK"], "tr"),
    Truth(TruthKind.JSON, INVOICE, schema=SCHEMA),
    Truth(TruthKind.CALLS, [TIMER]),
]
STRANGE = ["[" * 100_000, '{"total": NaN}', "\ud800", "9" * 5000, '{"vendor": 1e999}', "```json\n```", "\x00"]


@given(text=st.sampled_from(STRANGE) | st.text(), arguments=VALUES, truth=st.sampled_from(TRUTHS))
def test_whatever_a_server_says_is_judged(text, arguments, truth):
    assert judge(truth, GivenAnswer(text, ({"name": text, "arguments": arguments},))).right in (True, False)


def test_where_no_call_is_right_words_are():
    assert is_right(Truth(TruthKind.CALLS, []), "You are welcome!")
    assert not is_right(Truth(TruthKind.CALLS, []), "", [CLOCK])
