"""Calls are read as models really write them, and their arguments are always one JSON object."""

import json

import pytest

from onebox.text.toolcalls import ToolDefinition
from tests.text.answers import Parsed, call, parse


def calls_of(text, **options):
    """The calls in the text, read at once and letter by letter."""
    parsed = parse([text], **options)
    assert parse(text, **options) == parsed
    return [(name, json.loads(arguments)) for name, arguments in parsed.calls]


def arguments_of(text):
    ((_, arguments),) = calls_of(text)
    return arguments


def test_values_keep_all_white_space_but_the_line_breaks_of_the_form():
    for value in ("    if x:\n        return 1\n", "\n", "", " ", "a\n\n", "\n\nb", "\t"):
        assert arguments_of(call(city=value)) == {"city": value}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=weather><parameter=city>Rome</parameter><parameter=days>3</parameter></function></tool_call>",
        "<tool_call>\n\n<function=weather>\n<parameter=city>Rome\n<parameter=days>3\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>",
        '<tool_call>\n<function=weather>\n{"city": "Rome", "days": 3}\n</function>\n</tool_call>',
    ],
    ids=["no breaks", "no </parameter>", "no </function>", "nor it", "no </tool_call>", "no end", "JSON"],
)
def test_what_models_leave_out_is_understood(text):
    assert calls_of(text) == [("weather", {"city": "Rome", "days": 3})]
    assert parse([text]).content == ""


@pytest.mark.parametrize("end", ["</parameter>\n", "</parameter>\n</function>\n"])
def test_a_call_that_lacks_its_end_ends_where_the_next_begins(end):
    text = f"<tool_call>\n<function=weather>\n<parameter=days>\n1\n{end}{call(city='Oslo')}"
    assert calls_of(text) == [("weather", {"days": 1}), ("weather", {"city": "Oslo"})]


@pytest.mark.parametrize(
    "value",
    [
        "<parameter>a</parameter><parameter>b</parameter>",
        "<config>\n<parameter=x>\n1\n</parameter>\n</config>",
        'print("</tool_call>", "</function>", "</parameter>")',
        "<tool_call>",
        "x</parameter>",
        "</function>",
        "a < b && c > d </",
    ],
)
def test_values_may_hold_text_that_looks_like_marks(value):
    assert arguments_of(call(city=value, days=1)) == {"city": value, "days": 1}


def test_a_parameter_that_is_given_already_does_not_end_a_value():
    value = "write <parameter=days> or <parameter=city>"
    assert arguments_of(call(days=1, city=value)) == {"days": 1, "city": value}


def test_unknown_functions_and_parameters_are_kept_as_strings():
    assert calls_of(call("unheard", n="5")) == [("unheard", {"n": "5"})]
    assert arguments_of(call(unheard="true", days="5")) == {"unheard": "true", "days": 5}


def test_a_value_that_is_not_of_its_type_is_kept_as_a_string():
    arguments = arguments_of(call(days="three", wind="windy", place="{'lat': 1}"))
    assert arguments == {"days": "three", "wind": "windy", "place": "{'lat': 1}"}


def test_of_a_parameter_given_twice_the_first_holds():
    twice = call(city="Rome", days="1").replace("</function>", "<parameter=city>\nOslo\n</parameter>\n</function>")
    assert arguments_of(twice) == {"city": "Rome", "days": 1}


def test_a_call_without_parameters_has_no_arguments():
    assert calls_of(call() + call()) == [("weather", {}), ("weather", {})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=city>\nNew Yo", {"city": "New Yo"}),
        ("<parameter=city>\nNew York\n</para", {"city": "New York"}),
        ("<parameter=city>\nNew York\n</parameter>\n<parameter=da", {"city": "New York"}),
        ("<parameter=city>\nNew York\n</parameter>\n<parameter=days>\n1", {"city": "New York", "days": 1}),
        ('<parameter=place>\n{"lat": 1', {"place": '{"lat": 1'}),
        ("<parameter=days>", {}),
        ("", {}),
    ],
)
def test_a_call_that_is_cut_off_has_the_arguments_that_are_there(text, arguments):
    assert calls_of(f"<tool_call>\n<function=weather>\n{text}") == [("weather", arguments)]


def test_a_call_that_is_cut_off_before_its_name_is_text():
    text = "I look.\n<tool_call>\n<function=weath"
    assert parse([text]) == parse(text) == Parsed("", text, [])


def test_text_in_a_call_that_is_no_part_of_it_is_not_lost():
    text = call(days=1).replace("</function>", "<parameter=ids: [1]\n</parameter>\nwell</function>")
    assert (
        parse([text])
        == parse(text)
        == Parsed("", "<parameter=ids: [1]\n</parameter>\nwell", [("weather", '{"days": 1}')])
    )


def test_any_schema_is_borne():
    for schema in ({}, {"properties": None}, {"properties": {"city": True}}, {"$ref": "#/nowhere"}, {"type": 5}):
        assert calls_of(call(city="Rome"), tools=[ToolDefinition("weather", schema)]) == [("weather", {"city": "Rome"})]
