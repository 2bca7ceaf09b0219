"""Grammars made to crash, loop or bloat what compiles them, and a generator of random ones."""

import random
from collections.abc import Callable
from typing import Any

from onebox.engine.grammar.value import Grammar


def _nested(depth: int, wrap: Callable[[Any], Any], value: Any) -> Any:
    for _ in range(depth):
        value = wrap(value)
    return value


def _definitions(count: int, wrap: Callable[[dict[str, str]], Any]) -> Grammar:
    """Each refers to the next as `wrap` says."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "string"}}})


def _rules(count: int, right: str, last: str = '"b"') -> Grammar:
    """Rules of which `right` is the right side; {} is the next one."""
    lines = [f"r{i}: {right.format(f'r{i + 1}')}" for i in range(count)]
    return Grammar.cfg("\n".join(["start: r0", *lines, f"r{count}: {last}"]))


def _terminals(count: int, right: str) -> Grammar:
    lines = [f"T{i}: {right.format(f'T{i + 1}')}" for i in range(count)]
    return Grammar.cfg("\n".join(["start: T0", *lines, f'T{count}: "b"']))


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "chained references": lambda: _definitions(1000, lambda ref: {"properties": {"x": ref}}),
    "90 chained references": lambda: _definitions(90, lambda ref: {"properties": {"x": ref}}),
    "2^40 by references": lambda: _definitions(40, lambda ref: {"allOf": [ref, ref]}),
    "a schema that is itself": lambda: Grammar.json_schema({"allOf": [{"$ref": "#"}]}),
    "chained anyOf": lambda: Grammar.json_schema(_nested(900, lambda x: {"anyOf": [x, {"type": "null"}]}, {})),
    "60 chained anyOf": lambda: Grammar.json_schema(_nested(60, lambda x: {"anyOf": [x, {"type": "null"}]}, {})),
    "5000 objects": lambda: Grammar.json_schema({"anyOf": [{"properties": {f"k{i}": {}}} for i in range(5000)]}),
    "3000 optional properties": lambda: Grammar.json_schema({"properties": {f"k{i}": {} for i in range(3000)}}),
    "a product of anyOf": lambda: Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(20)]}
    ),
    "huge counts": lambda: Grammar.json_schema(
        _nested(4, lambda x: {"type": "array", "items": x, "minItems": 10**9}, {"type": "string", "minLength": 10**9})
    ),
    "a prime": lambda: Grammar.json_schema({"type": "integer", "multipleOf": 999_983}),
    "a pattern of many states": lambda: Grammar.json_schema({"type": "string", "pattern": "^(.*a.{200})*$"}),
    "large enum": lambda: Grammar.json_schema({"enum": [{"a": i, "b": [i] * 5} for i in range(5000)]}),
    "a long constant": lambda: Grammar.json_schema({"const": "ab" * 200_000}),
    "1900 rules": lambda: _rules(1900, '"a" {}'),
    "1900 rules of one rule": lambda: _rules(1900, "{}"),
    "5000 rules": lambda: _rules(5000, '"a" {}'),
    "1900 terminals": lambda: _terminals(1900, '"a" {}'),
    "2^20 letters": lambda: _terminals(20, "{0} {0}"),
    "2^40 letters by rules": lambda: _rules(40, "{0} | {0} {0}"),
    "nested empty loops": lambda: Grammar.cfg("start: a*\na: b*\nb: c*\nc: a* | "),
    "only itself": lambda: Grammar.cfg("start: start"),
    "ambiguous": lambda: Grammar.cfg("start: start start | /[a-z ]/ | "),
    "a conjunction": lambda: Grammar.cfg("start: X\nX: " + " & ".join(f"/(?s:.*){i}(?s:.*)/" for i in range(30))),
    "a nested grammar": lambda: Grammar.cfg(_nested(40, "start: %lark {{\n{}\n}}".format, 'start: "a"')),
    "a nested regex": lambda: Grammar.regex(_nested(120, "({})*".format, "a")),
    "nested repetitions": lambda: Grammar.regex(_nested(8, "({}){{1,1000}}".format, "ab?")),
    "a regex of many states": lambda: Grammar.regex("(.*a.{30}|.*b.{30}|.*c.{30})*x"),
    "a huge repetition": lambda: Grammar.regex("(ab|cd){1,1000000000}"),
    "8000 choices": lambda: Grammar.choice([f"choice {i}" for i in range(8000)]),
}

_PIECES = [
    "a",
    "[a-z]",
    ".",
    r"\w",
    r"\d{2}",
    "(b|c)",
    "x{1,9}",
    "(?:ab)+",
    "é",
    r"\n",
    "[^x]",
    "(",
    ")",
    "*",
    "?",
    "{",
    "\\",
]
_KEYWORDS = ["type", "properties", "items", "anyOf", "allOf", "enum", "const", "$ref", "$defs", "required"]
_KEYWORDS += ["pattern", "minLength", "maxItems", "minimum", "format", "prefixItems", "multipleOf", "oneOf"]
_NAMES = ["string", "object", "array", "integer", "#", "#/$defs/a", "date-time", "^a+$", "\ud800"]
_VALUES = [*_NAMES, -1, 0, 3, 1.5, 10**20, None, True]


def _random_schema(rng: random.Random, depth: int = 0) -> Any:
    def inner() -> Any:
        return _random_schema(rng, depth + 1)

    if depth > 4 or rng.random() < 0.15:
        return rng.choice(_VALUES)
    schema: dict[str, Any] = {}
    for key in rng.sample(_KEYWORDS, rng.randint(0, 3)):
        typical = {
            "type": rng.choice(["string", "object", "array", "integer", "number", "boolean", "null"]),
            "properties": {name: inner() for name in rng.sample("abcd", rng.randint(0, 3))},
            "$defs": {"a": inner()},
            "anyOf": [inner() for _ in range(rng.randint(0, 3))],
            "items": inner(),
            "required": rng.sample("abcd", rng.randint(0, 2)),
            "enum": [rng.choice(_VALUES) for _ in range(rng.randint(0, 3))],
        }
        schema[key] = (
            typical[key] if key in typical and rng.random() < 0.8 else rng.choice([inner(), rng.choice(_VALUES)])
        )
    return schema


def _random_lark(rng: random.Random) -> str:
    def right(depth: int = 0) -> str:
        if depth > 3:
            return '"a"'
        repeated = f"({right(depth + 1)}){rng.choice(['*', '+', '?', '{2,5}', '{1,90000}'])}"
        grouped = [f"({right(depth + 1)})", f"{right(depth + 1)} | {right(depth + 1)}", repeated]
        parts = ['"a"', "/[a-z]+/", "x", "y", "Z", *grouped, '%json {"type": "object"}', '""']
        return " ".join(rng.choices(parts, k=rng.randint(1, 3)))

    lark = "\n".join(f"{name}: {right()}" for name in ("start", "x", "y", "Z"))
    return lark if rng.random() < 0.8 else "".join(rng.choice([c, c, c, c, "", "|"]) for c in lark)


def random_grammar(rng: random.Random) -> Grammar:
    """One of any kind; most are odd, some are none. May raise UsageError, as for a client."""
    match rng.randrange(5):
        case 0:
            return Grammar.regex("".join(rng.choices(_PIECES, k=rng.randint(1, 12))))
        case 1:
            return Grammar.choice(
                ["".join(rng.choices(["a", "\n", '"', "\\", "é", "\x00", "\ud800"], k=3)) for _ in range(4)]
            )
        case 2 | 3:
            return Grammar.json_schema(_random_schema(rng))
        case _:
            return Grammar.cfg(_random_lark(rng))
