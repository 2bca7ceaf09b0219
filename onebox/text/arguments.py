"""Tool arguments as JSON: the types that a tool's schema allows for a parameter, and text to a value of one of them."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["MAX_ARGUMENT_VALUES", "ArgumentTypes", "argument_json", "has_more_values", "json_of", "parse_json"]

MAX_ARGUMENT_VALUES = 131_072
"""Of a call of an earlier turn: as many as an object of free form may have."""
_QUOTED = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

_STRING = frozenset({"string"})
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_ANYTHING: Mapping[str, Any] = {}
"""The schema that a reference to nothing stands for."""
_TYPES = frozenset({*_NAMES.values(), "null"})


class ArgumentTypes:
    """The types of a tool's parameters by its JSON schema, which is read once, when this is made.

    A schema is a client's: it may refer to itself, and two references on each of 40 levels are 2^40 paths. So its nodes
    are taken as a graph, each visited once, and the time is linear in the schema's size whatever its shape.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = _followed(schema, schema).get("properties")
        nodes = properties if isinstance(properties, Mapping) else {}
        self._types: dict[str, frozenset[str]] = dict(zip(nodes, _types_of(list(nodes.values()), schema), strict=True))

    def __contains__(self, key: str) -> bool:
        return key in self._types

    def __iter__(self) -> Iterator[str]:
        """The parameters' names."""
        return iter(self._types)

    def of(self, key: str) -> frozenset[str]:
        """The JSON types that the parameter may have; none if any may be. An unknown parameter is a string."""
        return self._types.get(key, _STRING)


def _types_of(schemas: Sequence[Any], root: Mapping[str, Any]) -> list[frozenset[str]]:
    """The types that each schema allows: its own, or those of all schemas that it refers to or combines."""
    types: dict[int, frozenset[str]] = {}
    users: dict[int, list[int]] = {}
    """Of a schema, by its id, those whose types include its own."""
    waiting = list(schemas)
    while waiting:
        schema = waiting.pop()
        if id(schema) in types:
            continue
        types[id(schema)], parts = _own_types(schema, root)
        for part in parts:
            users.setdefault(id(part), []).append(id(schema))
        waiting += parts
    # Types flow to the users until nothing changes. A schema changes at most once for each type.
    changed = [node for node, own in types.items() if own]
    while changed:
        node = changed.pop()
        for user in users.get(node, ()):
            if not types[node] <= types[user]:
                types[user] |= types[node]
                changed.append(user)
    return [types[id(schema)] for schema in schemas]


def _own_types(schema: Any, root: Mapping[str, Any]) -> tuple[frozenset[str], list[Any]]:
    """The types that a schema names itself, and the schemas whose types it has as well."""
    if not isinstance(schema, Mapping):
        return frozenset(), []
    if isinstance(schema.get("$ref"), str):
        return frozenset(), [_resolve(schema, root)]
    nullable = frozenset({"null"}) if schema.get("nullable") is True else frozenset()
    if declared := _declared(schema):
        return declared | nullable, []
    return nullable, [option for word in ("anyOf", "oneOf", "allOf") for option in _list(schema.get(word))]


def argument_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written as text, of the first fitting type; a string if none fits.

    Models write "nothing" as an empty value: where no string is allowed that is null or, if null is not allowed either,
    no argument at all ("").
    """
    bare = text.strip()
    if not bare and types and "string" not in types:
        return "null" if "null" in types else ""
    # The template shows null in earlier calls as Python's None, and models repeat it.
    if bare in ("null", "None") and ("null" in types or "string" not in types):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    value = parse_json(bare)
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        value = int(value)
    name = _NAMES.get(type(value), "")
    fits = name in (types or {"object", "array"}) or (name == "integer" and "number" in types)
    return json_of(value if fits and name != "string" else text)


def json_of(value: Any) -> str:
    """How onebox writes arguments: default separators, no escapes beyond JSON's."""
    return json.dumps(value, ensure_ascii=False)


def has_more_values(text: str, limit: int) -> bool:
    """Whether JSON text holds more than so many values, without parsing it."""
    if sum(map(text.count, ",[{")) <= limit:
        return False
    return sum(map(_QUOTED.sub("", text).count, ",[{")) > limit


def parse_json(text: str) -> Any:
    """The value of JSON text; None if it is invalid or cannot be sent (infinite, too deep, a lone surrogate)."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        json_of(value).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names itself, or shows by its values or its members."""
    named = schema.get("type")
    named = [named] if isinstance(named, str) else _list(named)
    types = {name for name in named if isinstance(name, str)} & _TYPES
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not types and values:
        types = {"null" if value is None else _NAMES.get(type(value), "string") for value in values}
    if not types:
        types = {name for word, name in (("properties", "object"), ("items", "array")) if word in schema}
    return frozenset(types)


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a `$ref` into the same document points at; the schema itself without one."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    found: Any = root
    path = reference.removeprefix("#").strip("/")
    for step in path.split("/") if path else ():
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else _ANYTHING


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema at the end of a chain of references; an empty one if the chain has no end."""
    seen = set()
    while isinstance(schema.get("$ref"), str):
        if id(schema) in seen:
            return _ANYTHING
        seen.add(id(schema))
        schema = _resolve(schema, root)
    return schema


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
