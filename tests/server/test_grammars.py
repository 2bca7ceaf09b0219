"""Grammars of tool calls and of what follows reasoning: what they take and refuse; the parser reads what they take."""

import json

import pytest

from onebox.engine.api import Grammar, GrammarError
from onebox.engine.grammar.compiler import GrammarCompiler
from onebox.server.grammars import after_reasoning, either, tool_calls
from onebox.spec.errors import UnsupportedError, UsageError
from onebox.text.parser import AnswerParser
from onebox.text.toolcalls import ToolCallArguments, ToolCallStart, ToolDefinition
from onebox.text.vocabulary import token_table

WEATHER = ToolDefinition(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["celsius", "kelvin"]},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        },
        "required": ["city", "days"],
        "$defs": {"place": {"type": "object"}, "tag": {"enum": ["a", "b"]}},
    },
)
PING = ToolDefinition("ping", {})
ANY = ToolDefinition("any", {"type": "object", "additionalProperties": True})

ROME = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
END = "</function>\n</tool_call>"
PONG = "<tool_call>\n<function=ping>\n" + END


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    compiler = GrammarCompiler(token_table(tokenizer, (258,)), 384)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def takes(vocabulary, tokenizer):
    """Whether a grammar takes a text from end to end."""

    def check(grammar, text):
        constraint = vocabulary.constrain(grammar)
        try:
            for token_id in (*tokenizer.encode(text), 258):
                constraint.advance(token_id)
        except UnsupportedError:
            return False
        return True

    return check


@pytest.mark.parametrize(
    "text",
    [
        ROME + END,
        ROME + "<parameter=unit>\nkelvin\n</parameter>\n" + END,
        ROME + '<parameter=tags>\n["a", "b"]\n</parameter>\n' + END,
        ROME + "<parameter=where>\nnear </b>\nthe river\n</parameter>\n" + END,
        ROME + END + "\n" + PONG,
        PONG,
    ],
)
def test_calls_in_the_models_form_are_taken_and_read_back(takes, text):
    assert takes(tool_calls([WEATHER, PING], is_one=False), text)
    parser = AnswerParser(in_reasoning=False, tools=[WEATHER, PING])
    deltas = parser.push(text) + parser.flush()
    names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    assert names == [line[10:-1] for line in text.splitlines() if line.startswith("<function=")]
    for index in range(len(names)):
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolCallArguments) and d.index == index)
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    "text",
    [
        "Sure!",
        "<tool_call>\n<function=delete_all>\n" + END,
        "<tool_call>\n<function=get_weather>\n" + END,
        ROME.replace("3", "three") + END,
        ROME.replace("3", "15") + END,
        ROME + "<parameter=unit>\nrankine\n</parameter>\n" + END,
        ROME + '<parameter=tags>\n["c"]\n</parameter>\n' + END,
        ROME + END + " and more",
        ROME,
    ],
)
def test_what_is_no_call_of_these_tools_is_not_taken(takes, text):
    assert not takes(tool_calls([WEATHER, PING], is_one=False), text)


def test_one_call_means_one(takes):
    grammar = tool_calls([PING], is_one=True)
    assert takes(grammar, PONG)
    assert not takes(grammar, PONG + "\n" + PONG)


def test_a_tool_that_takes_anything_may_get_anything(takes):
    text = "<tool_call>\n<function=any>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\nz\n</parameter>\n" + END
    assert takes(tool_calls([ANY], is_one=True), text)
    assert not takes(tool_calls([PING], is_one=True), text.replace("any", "ping"))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_object(),
        Grammar.json_schema({"type": "object"}),
        Grammar.regex(r'\{"a": \d\}'),
        Grammar.choice(['{"a": 1}', "no"]),
        Grammar.cfg('start: "{" inner "}"\ninner: "\\"a\\": " /[0-9]/'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_any_grammar_can_wait_for_the_end_of_reasoning(takes, grammar):
    later = after_reasoning(grammar)
    assert takes(later, 'Let me see: {"b" < 5}\n</think>\n\n{"a": 1}')
    assert takes(later, '</think>{"a": 1}')
    assert not takes(later, '{"a": 1}')
    assert not takes(later, "Hm\n</think>\n\nHm")


def test_either_of_two_is_taken(takes):
    grammar = either(tool_calls([PING], is_one=False), Grammar.json_object())
    assert takes(grammar, PONG)
    assert takes(grammar, '{"a": []}')
    assert not takes(grammar, "a")


def test_many_values_of_a_parameter_are_no_burden(takes):
    names = [f"name {place}" for place in range(3000)]
    tool = ToolDefinition("pick", {"properties": {"name": {"enum": names}}, "required": ["name"]})
    call = "<tool_call>\n<function=pick>\n<parameter=name>\n{}\n</parameter>\n</function>\n</tool_call>"
    grammar = tool_calls([tool], is_one=True)
    assert takes(grammar, call.format("name 2999"))
    assert not takes(grammar, call.format("name 3000"))


def test_names_of_required_parameters_are_looked_up_at_once():
    properties = {f"p{place}": True for place in range(4000)}
    tool = ToolDefinition("f", {"properties": properties, "required": [[1]] * 1_000_000})
    with pytest.raises(UsageError, match="at most"):
        tool_calls([tool], is_one=True)


def test_schemas_that_are_too_long_together_are_refused_before_they_are_written():
    definitions = {"a": {"enum": ["x" * 90] * 1000}}
    properties = {f"p{place}": {"type": "array", "items": {"$ref": "#/$defs/a"}} for place in range(5000)}
    tool = ToolDefinition("f", {"properties": properties, "$defs": definitions})
    with pytest.raises(UsageError, match="tools' schemas are too long in all: at most 524288 bytes"):
        tool_calls([tool], is_one=True)


def test_a_part_s_refusal_names_the_field_that_asked_for_it(vocabulary):
    tools = tool_calls([ToolDefinition("f", {"properties": {"x": {"type": "object", "not": {}}}})], is_one=True)
    asked = Grammar.json_schema({"type": "object"}).named("response_format")
    with pytest.raises(GrammarError, match="JSON schema cannot be used") as refusal:
        vocabulary.constrain(after_reasoning(either(tools, asked)))
    assert refusal.value.field_name == "tools"
    with pytest.raises(GrammarError, match="JSON schema cannot be used") as refusal:
        vocabulary.constrain(after_reasoning(Grammar.json_schema({"not": {}}).named("guided_json")))
    assert refusal.value.field_name == "guided_json"


def test_a_schema_that_is_none_is_refused(vocabulary):
    with pytest.raises(UsageError, match="tool 'f' are no JSON schema of an object"):
        tool_calls([ToolDefinition("f", {"properties": []})], is_one=True)
    parameters = {"properties": {"x": {"type": "integer", "minimum": "a"}}}
    with pytest.raises(GrammarError, match="JSON schema cannot be used"):
        vocabulary.constrain(tool_calls([ToolDefinition("f", parameters)], is_one=True))
