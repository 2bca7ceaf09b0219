"""Values are typed by the tool's schema."""

import json

import pytest

from onebox.text.arguments import ArgumentTypes, argument_json, parse_json

DEFINITIONS = {
    "Unit": {"enum": ["C", "F"]},
    "Place": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Place"}}},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"$ref": "#/$defs/Unit"}, {"type": "number"}]}, {"string", "number"}),
        ({"allOf": [{"$ref": "#/$defs/Place"}], "description": "where"}, {"object"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/$defs/Missing"}, set()),
        ({"enum": [1, "one", None, True, 1.5]}, {"integer", "string", "null", "boolean", "number"}),
        ({"const": 7}, {"integer"}),
        ({"items": {"type": "string"}}, {"array"}),
        ({"properties": {}}, {"object"}),
        ({"type": "any"}, set()),
        ({}, set()),
        (True, set()),
    ],
)
def test_the_types_that_a_schema_allows(schema, types):
    assert ArgumentTypes({"properties": {"x": schema}, "$defs": DEFINITIONS}).of("x") == types


def test_a_parameter_that_the_schema_does_not_name_is_a_string():
    types = ArgumentTypes({"properties": {"x": {}}})
    assert ("x" in types, "y" in types, types.of("y")) == (True, False, {"string"})


def test_a_tool_may_refer_to_the_schema_of_its_parameters():
    types = ArgumentTypes({"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"x": {"type": "boolean"}}}}})
    assert types.of("x") == {"boolean"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 5 ", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"number"}, 5),
        ("5.0", {"number"}, 5.0),
        ("1e3", {"number"}, 1000.0),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ("true", {"integer"}, "true"),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("1", {"boolean"}, "1"),
        ("null", {"integer"}, None),
        ("None", {"object", "null"}, None),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("5", {"string", "null"}, "5"),
        ("5", {"string", "integer"}, 5),
        (" five ", {"string", "integer"}, " five "),
        ('{"a": [1, "é"]}', {"object"}, {"a": [1, "é"]}),
        ("[1, 2]", {"array"}, [1, 2]),
        ("[1, 2]", {"object"}, "[1, 2]"),
        ('"[1]"', {"array"}, '"[1]"'),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ('{"a": "\\ud800"}', {"object"}, '{"a": "\\ud800"}'),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ('{"a": 1}', set(), {"a": 1}),
        ("5", set(), "5"),
        ("", set(), ""),
        ("", {"string", "integer"}, ""),
        ("", {"integer", "null"}, None),
    ],
)
def test_text_becomes_a_value_of_its_type_or_stays_text(text, types, value):
    written = argument_json(text, frozenset(types))
    assert json.loads(written) == value
    assert type(json.loads(written)) is type(value)
    written.encode()


def test_an_empty_value_that_cannot_be_text_is_no_argument():
    assert argument_json("\n", frozenset({"integer"})) == ""


def test_only_json_that_can_be_sent_on_is_parsed():
    assert parse_json('{"a": 1.5}') == {"a": 1.5}
    for text in ("", "{", "Infinity", "-1e400", '"\\ud83d"', "{'a': 1}", '[{"a":' * 50_000):
        assert parse_json(text) is None


def doubling(num_levels):
    """Each level refers to the next one twice: 2^num_levels paths lead to the last."""
    levels = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(num_levels)}
    copies = {f"c{n}": {"allOf": [{"$ref": f"#/$defs/c{n + 1}"}, {"$ref": f"#/$defs/c{n + 1}"}]} for n in range(40)}
    return {**levels, f"l{num_levels}": {"type": "integer"}, **copies, "c40": {"type": "boolean"}}


def chained(num_levels, last):
    schema = last
    for _ in range(num_levels):
        schema = {"anyOf": [schema]}
    return schema


@pytest.mark.parametrize(
    ("schema", "definitions", "types"),
    [
        ({"$ref": "#/$defs/l0"}, doubling(40), {"integer"}),
        ({"oneOf": [{"$ref": "#/$defs/l0"}, {"$ref": "#/$defs/c0"}]}, doubling(5000), {"integer", "boolean"}),
        (chained(20_000, {"type": "array"}), {}, {"array"}),
        ({"allOf": [{"$ref": "#/$defs/l0"}] * 20_000}, doubling(40), {"integer"}),
        (
            {"$ref": "#/$defs/a"},
            {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
                "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "number"}]},
            },
            {"null", "number"},
        ),
        ({"$ref": "#/$defs/" + "a/" * 50_000}, {}, set()),
        ({"anyOf": [True, False, None, 5, [], {"$ref": []}, {"type": {}}, {"anyOf": {}}]}, {}, set()),
        ({"$ref": "#"}, {}, {"object"}),
    ],
    ids=["2^40", "deep", "nested", "wide", "cycle", "long path", "no schemas", "root"],
)
def test_the_time_is_linear_in_the_schema_whatever_its_shape(schema, definitions, types):
    assert ArgumentTypes({"properties": {"x": schema}, "$defs": definitions}).of("x") == types


def test_many_parameters_share_the_work_of_what_they_refer_to():
    definitions = doubling(2000)
    types = ArgumentTypes({"properties": {str(n): {"$ref": "#/$defs/l0"} for n in range(5000)}, "$defs": definitions})
    assert {types.of(str(n)) for n in range(5000)} == {frozenset({"integer"})}


@pytest.mark.parametrize("properties", [[], [{"a": 1}], "x", None, True, 5])
def test_properties_that_are_no_object_name_no_parameter(properties):
    assert ArgumentTypes({"properties": properties}).of("x") == {"string"}
    assert list(ArgumentTypes({"$ref": "#/a", "a": {"$ref": "#"}, "properties": {"x": {}}})) == []
