"""Bounds of a grammar's text that cost nothing to check: bytes, nesting, references, alternatives.

They keep the plainly hostile away from the checker's process, which finds out about the rest. Nothing here recurses, so
no nesting is too deep to be refused.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

from onebox.spec.errors import UsageError

__all__ = [
    "MAX_CHOICES",
    "MAX_GRAMMAR_BYTES",
    "check_choices",
    "check_lark",
    "check_regex",
    "check_schema",
    "check_text",
]

MAX_GRAMMAR_BYTES = 512 * 1024
"""Of any grammar, composed ones included."""
MAX_REGEX_BYTES = 16 * 1024
MAX_CHOICES = 10_000
_MAX_DEPTH = 128
"""Levels of JSON in a schema, of groups in a regex."""
_MAX_VALUES = 100_000
"""Objects, arrays and plain values in a schema."""
_MAX_REFERENCES = 2000
_MAX_CHAIN = 100
"""References that lead one to the next."""
_MAX_RULES = 2000
_MAX_ALTERNATIVES = 10_000

_NAMES_OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Their keys are names that a client chose, not keywords."""

# Possessive, and a text that does not end is one to the end of its line: no character is read twice, whatever comes.
_RULE = re.compile(r"^[ \t]*+[?!]?+\w++(?:[.\[{(][^\n:]*+)?+[ \t]*+:", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\\n]++|\\.)*+"?+')


def check_text(text: str, name: str) -> None:
    """Refuses a grammar that is too long, or not text."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair.
        raise UsageError(
            f"The {name} cannot be used: it holds half of a surrogate pair, which is no character."
        ) from None
    _refuse_over(num_bytes, MAX_GRAMMAR_BYTES, f"The {name} has {num_bytes} bytes")


def check_choices(num_choices: int) -> None:
    _refuse_over(num_choices, MAX_CHOICES, f"The list of choices has {num_choices} entries")


def check_regex(pattern: str, name: str = "regex") -> None:
    """Refuses a pattern that is too long or too deeply nested."""
    _refuse_over(len(pattern), MAX_REGEX_BYTES, f"The {name} has {len(pattern)} characters")
    if re.search(r"(?<!\\)(?:\\\\)*\\\Z", pattern):
        raise UsageError(f"The {name} cannot be used: it ends with a backslash that escapes nothing.")
    depth = deepest = 0
    for mark in re.findall(r"\\.|[()]", pattern, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(mark, 0)
        deepest = max(deepest, depth)
    _refuse_over(deepest, _MAX_DEPTH, f"The {name} nests groups {deepest} deep")


def check_lark(text: str) -> None:
    """Refuses a grammar with too many rules, alternatives or nested groups."""
    num_rules = len(_RULE.findall(text))
    _refuse_over(num_rules, _MAX_RULES, f"The grammar has {num_rules} rules")
    bare = _QUOTED.sub('""', text)
    num_alternatives = bare.count("|")
    _refuse_over(num_alternatives, _MAX_ALTERNATIVES, f"The grammar has {num_alternatives} alternatives")
    depth = deepest = 0
    for mark in re.findall(r"[()\[\]{}]", bare):
        depth = max(0, depth + (1 if mark in "([{" else -1))
        deepest = max(deepest, depth)
    _refuse_over(deepest, _MAX_DEPTH, f"The grammar nests groups {deepest} deep")


class _Node(NamedTuple):
    key: object
    """Of this value in the one around it."""
    depth: int
    value: Any


def check_schema(schema: dict[str, Any]) -> None:
    """Refuses a schema that is too deep, too large, or whose references are too many or lead too far."""
    nodes: list[_Node] = []
    references: list[tuple[int, str]] = []
    for node in _nodes(schema):
        _refuse_over(node.depth, _MAX_DEPTH, "The JSON schema is nested deeper", is_exact=False)
        nodes.append(node)
        _refuse_over(len(nodes), _MAX_VALUES, "The JSON schema holds more values", is_exact=False)
        if isinstance(node.value, dict):
            _check_keywords(node)
            if isinstance(node.value.get("$ref"), str):
                references.append((len(nodes) - 1, node.value["$ref"]))
    _refuse_over(len(references), _MAX_REFERENCES, f"The JSON schema has {len(references)} references")
    chain = _longest_chain(schema, nodes, references)
    _refuse_over(chain, _MAX_CHAIN, f"The JSON schema has references that lead {chain} steps, one to the next")


def _check_keywords(node: _Node) -> None:
    """Refuses patterns beyond the regex's bounds, and references that are no text."""
    value = node.value
    is_schema = node.key not in _NAMES_OF_SCHEMAS
    if is_schema and "$ref" in value and not isinstance(value["$ref"], str):
        raise UsageError("The JSON schema cannot be used: a $ref is not a text.")
    if is_schema and isinstance(value.get("pattern"), str):
        check_regex(value["pattern"], "JSON schema's pattern")
    if isinstance(value.get("patternProperties"), dict):
        for pattern in value["patternProperties"]:
            check_regex(pattern, "JSON schema's patternProperties")


def _nodes(schema: Any) -> Iterator[_Node]:
    """All values in document order."""
    stack = [_Node(None, 1, schema)]
    while stack:
        node = stack.pop()
        yield node
        children: list[tuple[Any, Any]] = []
        if isinstance(node.value, dict):
            children = list(node.value.items())
        elif isinstance(node.value, list):
            children = list(enumerate(node.value))
        stack += [_Node(key, node.depth + 1, value) for key, value in reversed(children)]


def _target(schema: Any, reference: str) -> Any:
    """What a reference such as #/$defs/name points to; None where there is nothing."""
    value = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _longest_chain(schema: Any, nodes: list[_Node], references: list[tuple[int, str]]) -> int:
    """The most references that follow one another from the root, each place entered once."""
    places = {id(node.value): place for place, node in enumerate(nodes) if isinstance(node.value, dict | list)}
    ends = _ends(nodes)
    at = [place for place, _ in references]

    def inside(place: int) -> list[str]:
        """What the references inside a place point to."""
        return [target for _, target in references[bisect_left(at, place) : bisect_left(at, ends[place])]]

    # Each once: many places may hold the same reference, and its path may be long.
    targets = {target: places.get(id(_target(schema, target))) for _, target in references}
    seen, longest = {0}, 0
    stack = [(0, iter(inside(0)))] if nodes else []
    while stack:
        depth = len(stack)
        target = next(stack[-1][1], None)
        if target is None:
            stack.pop()
            continue
        place = targets[target]
        longest = max(longest, depth)
        if place is not None and place not in seen:
            seen.add(place)
            stack.append((place, iter(inside(place))))
    return longest


def _ends(nodes: list[_Node]) -> list[int]:
    """Behind each node, the place of the first one that is not inside it."""
    ends, open_places = [len(nodes)] * len(nodes), list[int]()
    for place, node in enumerate(nodes):
        while open_places and nodes[open_places[-1]].depth >= node.depth:
            ends[open_places.pop()] = place
        open_places.append(place)
    return ends


def _refuse_over(found: int, limit: int, what: str, *, is_exact: bool = True) -> None:
    if found > limit:
        sentence = f"{what}; at most {limit} are allowed." if is_exact else f"{what} than the {limit} that are allowed."
        raise UsageError(sentence)
