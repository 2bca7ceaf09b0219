"""Small Python functions and classes to write or continue; the request determines the answer."""

import keyword
from random import Random

from recipes.pocket.synthetic.example import Example, text_is
from recipes.pocket.synthetic.words import WORDS, identifier

__all__ = ["code"]

_TYPES = ("int", "str", "float", "bool", "list[str]", "dict[str, int]")
_OPERATORS = {"sum": "+", "difference": "-", "product": "*"}
_ENDINGS = {"int": "0", "str": '""', "float": "0.0", "bool": "False", "list[str]": "[]", "dict[str, int]": "{}"}


def _name(rng: Random) -> str:
    return rng.choice(WORDS["en"]) if rng.random() < 0.6 else identifier(rng)


def _names(rng: Random, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        name = _name(rng)
        if name not in names and not keyword.iskeyword(name):
            names.append(name)
    return names


def _class(rng: Random) -> tuple[str, str]:
    name, *fields = _names(rng, rng.randint(3, 5))
    types = [rng.choice(_TYPES) for _ in fields]
    name = name.capitalize()
    signature = ", ".join(f"{field}: {kind}" for field, kind in zip(fields, types, strict=True))
    body = "\n".join(f"        self.{field} = {field}" for field in fields)
    request = f"Write a Python class {name} whose constructor takes {signature} and keeps them."
    return request, f"class {name}:\n    def __init__(self, {signature}) -> None:\n{body}"


def _dataclass(rng: Random) -> tuple[str, str]:
    name, *fields = _names(rng, rng.randint(3, 5))
    lines = [f"    {field}: {kind} = {_ENDINGS[kind]}" for field in fields if (kind := rng.choice(_TYPES[:4]))]
    listed = ", ".join(line.strip().partition(" =")[0] for line in lines)
    request = f"Write a Python dataclass {name.capitalize()} with the fields {listed}, each with an empty default."
    return request, "\n".join(["@dataclass", f"class {name.capitalize()}:", *lines])


def _combine(rng: Random) -> tuple[str, str]:
    name, *parameters = _names(rng, rng.randint(3, 5))
    what = rng.choice(list(_OPERATORS))
    expression = f" {_OPERATORS[what]} ".join(parameters)
    listed = ", ".join(parameters)
    return (
        f"Write a Python function {name} that returns the {what} of {listed}.",
        f"def {name}({listed}):\n    return {expression}",
    )


def _loop(rng: Random) -> tuple[str, str]:
    name, values, result = _names(rng, 3)
    limit = rng.randint(0, 99)
    sign, said = rng.choice(((">", "greater than"), ("<", "less than"), ("==", "equal to")))
    lines = (
        f"def {name}({values}):",
        f"    {result} = []",
        f"    for value in {values}:",
        f"        if value {sign} {limit}:",
        f"            {result}.append(value)",
        f"    return {result}",
    )
    request = f"Write a Python function {name} that collects the values in {values} {said} {limit} in a list {result}."
    return request, "\n".join(lines)


def _count(rng: Random) -> tuple[str, str]:
    name, values, item = _names(rng, 3)
    return (
        f"Write a Python function {name} that counts how often {item} occurs in {values}.",
        f"def {name}({values}, {item}):\n    count = 0\n    for value in {values}:\n        if value == {item}:\n"
        "            count += 1\n    return count",
    )


def _constants(rng: Random) -> tuple[str, str]:
    names = _names(rng, rng.randint(2, 5))
    values = {name: rng.randint(0, 999) for name in names}
    listed = ", ".join(f"{name} is {value}" for name, value in values.items())
    lines = "\n".join(f'    "{name}": {value},' for name, value in values.items())
    return f"Write a Python dictionary NUMBERS in which {listed}.", f"NUMBERS = {{\n{lines}\n}}"


def _test(rng: Random) -> tuple[str, str]:
    name, *_ = _names(rng, 1)
    cases = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(rng.randint(1, 4))]
    listed = ", ".join(f"{name}({given}) is {result}" for given, result in cases)
    body = "\n".join(f"    assert {name}({given}) == {result}" for given, result in cases)
    return f"Write a Python test that says: {listed}.", f"def test_{name}():\n{body}"


def code(rng: Random) -> Example:
    """A request for a few lines; sometimes the first lines are given."""
    request, text = rng.choice((_class, _dataclass, _combine, _loop, _count, _constants, _test))(rng)
    lines = text.split("\n")
    if rng.random() < 0.3:
        given = rng.randint(1, len(lines) - 1)
        request = f"{request} Continue:\n\n" + "\n".join(lines[:given])
        lines = lines[given:]
    answer = "```python\n" + "\n".join(lines) + "\n```"
    thought = f"I write {len(lines)} line{'s' if len(lines) > 1 else ''} of Python." if rng.random() < 0.3 else ""
    return Example.ask(request, answer, text_is(answer), reasoning=thought)
