"""A grammar as a value: what is refused when it is created, without the grammar library."""

import pickle
import random
import subprocess
import sys

import pytest
from llguidance import regex_to_lark

from onebox.engine.grammar.value import Grammar, GrammarError, GrammarKind
from onebox.spec.errors import UsageError


def nested(depth, wrap, value):
    for _ in range(depth):
        value = wrap(value)
    return value


def chain(length, wrap):
    """A schema of definitions that refer one to the next."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def test_a_grammar_crosses_a_process_boundary_and_names_itself():
    grammar = Grammar.regex("a+")
    assert pickle.loads(pickle.dumps(grammar)) == grammar == Grammar(GrammarKind.REGEX, "a+")  # noqa: S301
    assert len({grammar, Grammar.regex("a+"), Grammar.choice(["a+"])}) == 2


def test_a_refusal_crosses_a_process_boundary_with_its_field():
    error = pickle.loads(pickle.dumps(GrammarError("No.", "guided_json")))  # noqa: S301
    assert (str(error), error.field_name) == ("No.", "guided_json")


def test_grammars_that_are_refused_with_other_names_have_other_keys():
    schema = Grammar.json_schema({"type": "object"})
    assert schema.key == Grammar.json_schema({"type": "object"}).key
    grammars = [schema, schema.named("guided_json"), Grammar.json_object(), Grammar.cfg(schema.rules, parts=(schema,))]
    assert len({grammar.key for grammar in grammars}) == 4


@pytest.mark.parametrize(
    ("make", "argument", "sentence"),
    [
        (Grammar.json_schema, [], "A JSON schema must be an object; this one is []."),
        (Grammar.json_schema, {"default": b""}, "The JSON schema cannot be written as JSON (Object of type bytes"),
        (Grammar.json_schema, {"default": float("nan")}, "The JSON schema cannot be written as JSON (Out of range"),
        (Grammar.json_schema, {"x-guidance": {}}, "The JSON schema holds x-guidance, settings of the grammar library"),
        (Grammar.json_schema, {"$ref": []}, "The JSON schema cannot be used: a $ref is not a text."),
        (Grammar.json_schema, {"anyOf": [{"$ref": 5}]}, "The JSON schema cannot be used: a $ref is not a text."),
        (Grammar.regex, "\ud800", "The regex cannot be used: it holds half of a surrogate pair"),
        (Grammar.regex, "a\\", "The regex cannot be used: it ends with a backslash that escapes nothing."),
        (Grammar.regex, 5, "The regex must be a text; this one is 5."),
        (Grammar.cfg, 'start: "\udfff"', "The grammar cannot be used: it holds half of a surrogate pair"),
        (Grammar.choice, ["\ud800"], "The list of choices cannot be used: it holds half of a surrogate pair"),
        (Grammar.choice, [], "The list of choices is empty; give at least one."),
        (Grammar.choice, ["a", ""], "Each choice must be a text of at least one character; one is ''."),
        (Grammar.choice, [1], "Each choice must be a text of at least one character; one is 1."),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_sentence(make, argument, sentence):
    with pytest.raises(UsageError) as refusal:
        make(argument)
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "argument", "sentence"),
    [
        (Grammar.json_schema, {"const": "x" * 600_000}, "has 600013 bytes; at most 524288 are allowed"),
        (Grammar.json_schema, chain(1000, lambda ref: ref), "lead 1001 steps, one to the next; at most 100"),
        (Grammar.json_schema, chain(150, lambda ref: {"items": [ref, ref]}), "lead 151 steps"),
        (Grammar.json_schema, nested(300, lambda inner: {"anyOf": [inner]}, {}), "deeper than the 128"),
        (Grammar.json_schema, nested(5000, lambda inner: {"anyOf": [inner]}, {}), "cannot be written as JSON"),
        (Grammar.json_schema, {"enum": [0] * 150_000}, "more values than the 100000"),
        (Grammar.json_schema, {"anyOf": [{"$ref": "#"}] * 3000}, "has 3000 references; at most 2000"),
        (Grammar.json_schema, {"pattern": "(" * 200}, "pattern nests groups 200 deep; at most 128"),
        (Grammar.json_schema, {"patternProperties": {"a" * 20_000: {}}}, "has 20000 characters; at most 16384"),
        (Grammar.regex, nested(5000, "({})*".format, "a"), "nests groups 5000 deep; at most 128"),
        (Grammar.regex, "a" * 20_000, "has 20000 characters; at most 16384"),
        (Grammar.choice, [str(i) for i in range(100_000)], "has 100000 entries; at most 10000"),
        (Grammar.cfg, "\n".join(f'r{i}: "a"' for i in range(5000)), "has 5000 rules; at most 2000"),
        (Grammar.cfg, "\n".join(f'T_{i}.1: "a"' for i in range(10_000)), "has 10000 rules; at most 2000"),
        (Grammar.cfg, "start: " + "|".join(['"|"'] * 20_000), "has 19999 alternatives; at most 10000"),
        (Grammar.cfg, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nests groups 5000 deep; at most 128"),
    ],
    ids=lambda value: None if isinstance(value, dict | list) or len(str(value)) > 60 else str(value),
)
def test_what_is_too_large_is_refused_with_the_limit_and_its_size(make, argument, sentence):
    with pytest.raises(UsageError) as refusal:
        make(argument)
    assert sentence in str(refusal.value)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "schema",
    [
        chain(99, lambda ref: {"properties": {"x": ref}}),
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/nowhere/0"}, {"$ref": "#/anyOf/1"}, {"$ref": "elsewhere"}]},
        {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
    ],
)
def test_references_within_bounds_are_the_library_s_matter(schema):
    assert Grammar.json_schema(schema).kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"\n"' + '\\"' * 240_000,
        'start: "a"\na(' + " " * 500_000,
        '" ' * 200_000,
        "a" * 500_000,
        "\\" * 500_000,
    ],
    ids=["escaped quotes", "a rule without an end", "quotes", "a name", "backslashes"],
)
def test_a_grammar_s_text_is_read_once(text):
    """Read again from every quote, half a megabyte would take half an hour."""
    assert Grammar.cfg(text).kind is GrammarKind.CFG


def test_references_with_long_paths_inside_each_other_are_followed_once():
    schema = {"anyOf": [{"$ref": "#" + "/a" * (1 + i % 90)} for i in range(1900)]}
    assert Grammar.json_schema(nested(90, lambda inner: {"a": inner}, schema)).kind is GrammarKind.JSON_SCHEMA


def test_a_regex_is_written_between_slashes_as_the_library_would():
    rng = random.Random(0)
    for _ in range(2000):
        pattern = "".join(rng.choices("\\/\n\r\tdwSa[]() ", k=rng.randint(0, 8))) + "a"
        assert Grammar.regex(pattern).rules == f"start: /{regex_to_lark(pattern, use_ascii='')}/"


def test_no_grammar_needs_the_library_before_it_is_checked():
    program = (
        "import sys\nfrom onebox.engine.api import Grammar\nfrom onebox.server.grammars import after_reasoning\n"
        "after_reasoning(Grammar.regex('a/b')).rules\nsys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
