"""Grammars and schemas that cost far more than their size: chains, doublings, huge choices, nested repetitions."""

import random
from typing import Any, NamedTuple

from benchmarks.soak.scenarios import CHAT, COMPLETIONS, MESSAGES, RESPONSES

__all__ = ["CostlyGrammar", "costly_grammars", "requests_with"]


class CostlyGrammar(NamedTuple):
    """`kind` is json, regex, choice or grammar, as in `structured_outputs`."""

    name: str
    kind: str
    value: Any


def costly_grammars(random_: random.Random) -> list[CostlyGrammar]:
    """One of each, with sizes that differ from run to run."""
    size = random_.choice((300, 1000, 4000))
    return [
        CostlyGrammar(f"ref chain of {size}", "json", _ref_chain(size)),
        CostlyGrammar("2^40 references", "json", _doubling("$ref")),
        CostlyGrammar("2^40 references in allOf", "json", _doubling("allOf")),
        CostlyGrammar(f"anyOf nested {size} deep", "json", _nested("anyOf", size)),
        CostlyGrammar(f"arrays nested {size} deep", "json", _nested_arrays(size)),
        CostlyGrammar("reference to itself", "json", {"$ref": "#"}),
        CostlyGrammar("references in a ring", "json", _ring(50)),
        CostlyGrammar("reference that is a list", "json", {"$ref": []}),
        CostlyGrammar("reference to nowhere", "json", {"$ref": "#/$defs/none"}),
        CostlyGrammar("reference to the network", "json", {"$ref": "http://192.0.2.1/schema"}),
        CostlyGrammar("10,000 properties", "json", _properties(10_000)),
        CostlyGrammar("enum of 50,000", "json", {"enum": [f"value {index}" for index in range(50_000)]}),
        CostlyGrammar("a thousand million characters", "json", {"type": "string", "minLength": 10**9}),
        CostlyGrammar("a million items", "json", {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
        CostlyGrammar("pattern in a pattern", "json", {"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"}),
        CostlyGrammar("100,000 choices", "choice", [f"choice {random_.random()} {index}" for index in range(100_000)]),
        CostlyGrammar("one choice of 2 MB", "choice", ["x" * 2_000_000, "y"]),
        CostlyGrammar("10,000 rules", "grammar", _rules(10_000)),
        CostlyGrammar("10,000 terminals", "grammar", _terminals(10_000)),
        CostlyGrammar("rules doubled 40 times", "grammar", _doubled_rules(40)),
        CostlyGrammar("ambiguous rule", "grammar", 'start: start start | "a" | "b" start | start "a" |'),
        CostlyGrammar("left recursion", "grammar", 'start: other\nother: start "x" | other other | "y"'),
        CostlyGrammar("parentheses of a grammar", "grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
        CostlyGrammar("repeated repetitions", "regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
        CostlyGrammar("parentheses of a pattern", "regex", "(" * 5000 + "a" + ")*" * 5000),
        CostlyGrammar("states doubled 60 times", "regex", "(a|b)*a" + "(a|b)" * 60),
        CostlyGrammar("many alternatives", "regex", "|".join(f"{index}[a-z]*{index}" for index in range(5000))),
        CostlyGrammar("broken pattern", "regex", "(?P<a>[z-a]{9,1}\\p{Nope})"),
        CostlyGrammar(
            "unknown schema words", "json", {"type": "object", "unevaluatedProperties": {"$dynamicRef": "#x"}}
        ),
    ]


def requests_with(costly: CostlyGrammar) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of every way to send it; only schemas go into tools."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "enable_thinking": False}
    ways: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat | {"structured_outputs": {costly.kind: costly.value}}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 6, f"guided_{costly.kind}": costly.value}),
    ]
    if costly.kind != "json":
        return ways
    schema = {"type": "object", "properties": {"value": costly.value}, "required": ["value"]}
    schema |= {key: costly.value[key] for key in ("$defs",) if key in costly.value}
    function = {"name": "act", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    wrapped = {"type": "json_schema", "name": "thing", "schema": costly.value}
    anthropic = {"model": "pocket", "messages": chat["messages"], "max_tokens": 40}
    return [
        *ways,
        (CHAT, chat | {"tools": tools}),
        (CHAT, chat | {"tools": tools, "tool_choice": "required"}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 6, "text": {"format": wrapped}}),
        (MESSAGES, anthropic | {"tools": [{"name": "act", "input_schema": schema}], "tool_choice": {"type": "any"}}),
    ]


def _ref_chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "string"}}}


def _doubling(how: str) -> dict[str, Any]:
    def level(index: int) -> dict[str, Any]:
        below = {"$ref": f"#/$defs/d{index + 1}"}
        both = {"properties": {"a": below, "b": below}, "required": ["a", "b"], "type": "object"}
        return both if how == "$ref" else {"allOf": [below, {**below, "description": "again"}]}

    levels = {f"d{index}": level(index) for index in range(40)}
    return {"$ref": "#/$defs/d0", "$defs": levels | {"d40": {"type": "integer"}}}


def _ring(length: int) -> dict[str, Any]:
    links = {f"d{index}": {"$ref": f"#/$defs/d{(index + 1) % length}"} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links}


def _nested(word: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(min(depth, 400)):
        schema = {word: [schema, {"type": "null"}]}
    return schema


def _nested_arrays(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(min(depth, 400)):
        schema = {"type": "array", "items": schema}
    return schema


def _properties(count: int) -> dict[str, Any]:
    names = [f"property_{index}" for index in range(count)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


def _rules(count: int) -> str:
    lines = [f'r{index}: "a" r{index + 1} | "b"' for index in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "c"'])


def _terminals(count: int) -> str:
    names = " | ".join(f"T{index}" for index in range(count))
    return "\n".join([f"start: {names}", *(f"T{index}: /{index}[a-z]+/" for index in range(count))])


def _doubled_rules(levels: int) -> str:
    lines = [f"r{index}: r{index + 1} r{index + 1}" for index in range(levels)]
    return "\n".join(["start: r0", *lines, f'r{levels}: "a"'])
