"""Scores an answer by fixed rules. Only a rubric needs a model as a judge; that is `rubric.py`.

Accents count: "Becs" is not "Bécs". Each rule states what it tolerates; everything else is wrong.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from onebox.eval.pictures import MOST_ERRORS, character_errors
from onebox.eval.question import GivenAnswer, Judgement, Truth, TruthKind

__all__ = ["folded", "judge", "schema_problem"]

_QUOTES = "\"'`“”„‘’«»*"
_FENCE = re.compile(r"\A```(?:json|text)?\s*\n(.*?)\n?```\Z", re.S)
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def judge(truth: Truth, answer: GivenAnswer) -> Judgement | None:
    """None for a rubric, which another server judges."""
    return _RULES[truth.kind](truth, answer) if truth.kind in _RULES else None


def folded(text: str, language: str = "en") -> str:
    """Folds a text for case-insensitive comparison: composed accents, lower case; in Turkish İ/i and I/ı are pairs."""
    composed = unicodedata.normalize("NFC", text)
    if language == "tr":
        composed = composed.replace("İ", "i").replace("I", "ı")
    return unicodedata.normalize("NFC", composed.lower())


def _holds(truth: Truth, answer: GivenAnswer) -> Judgement:
    """Tolerates a sentence around the answer, letter case and emphasis marks."""
    said = folded(answer.text, truth.language).replace("*", "").replace("_", " ")
    wanted = [folded(value, truth.language) for value in truth.value]
    if any(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said) for value in wanted):
        return Judgement(True)
    return Judgement(False, why=f"does not contain {truth.value[0]!r}")


def _text(truth: Truth, answer: GivenAnswer) -> Judgement:
    """Tolerates whitespace and quotation marks around the answer and one trailing full stop."""
    said = unicodedata.normalize("NFC", answer.text).strip().strip(_QUOTES).strip()
    wanted = [unicodedata.normalize("NFC", value) for value in truth.value]
    if said in wanted or said.removesuffix(".") in wanted:
        return Judgement(True)
    return Judgement(False, why=f"is not {truth.value[0]!r}")


def _json(truth: Truth, answer: GivenAnswer) -> Judgement:
    """Tolerates a Markdown fence around JSON requested in the prompt; with a schema, nothing."""
    text = answer.text.strip()
    fenced = _FENCE.match(text) if truth.schema is None else None
    try:
        value = json.loads(fenced.group(1) if fenced else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Judgement(False, {"valid": 0.0, "fields": 0.0}, f"is not JSON ({error})")
    if not isinstance(value, dict):
        return Judgement(False, {"valid": 1.0, "fields": 0.0}, "is JSON, but not an object")
    same, extra = _same, [key for key in value if key not in truth.value]
    if truth.kind is TruthKind.FIELDS:
        same, extra = _holds_fields, []
    wrong = [key for key, expected in truth.value.items() if key not in value or not same(value[key], expected)]
    scores = {"valid": 1.0, "fields": 1 - len(wrong) / max(1, len(truth.value))}
    problem = None
    if truth.schema is not None:
        problem = schema_problem(value, truth.schema)
        scores["follows_schema"] = float(problem is None)
    complaints = [f"{key} is {value.get(key)!r}, not {truth.value[key]!r}" for key in wrong[:2]]
    complaints += [f"{key} was not requested" for key in extra[:1]] + ([problem] if problem else [])
    return Judgement(not (wrong or extra or problem), scores, "; ".join(complaints))


def _holds_fields(value: Any, expected: Any) -> bool:
    """Equality in which objects may have more keys than expected."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return all(key in value and _holds_fields(value[key], part) for key, part in expected.items())
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_holds_fields, value, expected))
    return _same(value, expected)


def _pattern(truth: Truth, answer: GivenAnswer) -> Judgement:
    """Searched anywhere in the answer, in composed Unicode; `^` and `$` are the ends of the answer."""
    said = unicodedata.normalize("NFC", answer.text).strip()
    if re.search(unicodedata.normalize("NFC", truth.value), said):
        return Judgement(True)
    return Judgement(False, why=f"does not match {truth.value!r}")


def _transcript(truth: Truth, answer: GivenAnswer) -> Judgement:
    """Tolerates a Markdown fence, line breaks for spaces, and `MOST_ERRORS` wrong characters."""
    fenced = _FENCE.match(answer.text.strip())
    errors = character_errors(fenced.group(1) if fenced else answer.text, truth.value[0])
    scores = {"characters": max(0.0, 1 - errors)}
    return Judgement(errors <= MOST_ERRORS, scores, "" if errors <= MOST_ERRORS else f"{errors:.1%} character errors")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _same(value: Any, expected: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, true is not a number, and Unicode composition of strings is ignored."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(_same(value[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(expected, str) and isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip() == unicodedata.normalize("NFC", expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return abs(value - expected) < 1e-9 * max(1.0, abs(expected))
    return bool(value == expected)


def schema_problem(value: Any, schema: dict[str, Any], place: str = "the answer") -> str | None:
    """Why a value does not follow a schema; None if it does. Supports the keywords used by the questions' schemas."""
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        return f"{place} is {value!r}, not one of {schema['enum']}"
    kind = schema.get("type")
    if kind is not None:
        is_whole = isinstance(value, float) and value.is_integer() and kind == "integer"
        fits = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        if not fits and not is_whole:
            return f"{place} is {value!r}, not of type {kind}"
    if isinstance(value, dict):
        return _object_problem(value, schema, place)
    if isinstance(value, list) and "items" in schema:
        found = (schema_problem(item, schema["items"], f"{place}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), None)
    return None


def _object_problem(value: dict[str, Any], schema: dict[str, Any], place: str) -> str | None:
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"{place} lacks {key!r}"
    for key, part in value.items():
        if key in properties:
            problem = schema_problem(part, properties[key], f"{place}.{key}")
            if problem:
                return problem
        elif schema.get("additionalProperties", True) is False:
            return f"{place} has {key!r}, which the schema does not allow"
    return None


def _calls(truth: Truth, answer: GivenAnswer) -> Judgement:
    """Tolerates any order of several calls. Without an expected call, any answer without a call is right."""
    made, expected = list(answer.calls), list(truth.value)
    names = sorted(call["name"] for call in made) == sorted(call["name"] for call in expected)
    rest = list(made)
    for call in expected:
        match = next((other for other in rest if _same_call(other, call)), None)
        if match is None:
            break
        rest.remove(match)
    else:
        if not rest:
            return Judgement(True, {"names": 1.0})
    said = ", ".join(f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in made)
    return Judgement(False, {"names": float(names)}, f"calls {said}" if said else "calls nothing")


def _same_call(made: dict[str, Any], expected: dict[str, Any]) -> bool:
    return made["name"] == expected["name"] and _same(made["arguments"], expected["arguments"])


_RULES: dict[TruthKind, Callable[[Truth, GivenAnswer], Judgement]] = {
    TruthKind.HOLDS: _holds,
    TruthKind.TEXT: _text,
    TruthKind.JSON: _json,
    TruthKind.FIELDS: _json,
    TruthKind.PATTERN: _pattern,
    TruthKind.TRANSCRIPT: _transcript,
    TruthKind.CALLS: _calls,
}
