r"""Own questions: a file of JSON lines, each with a prompt and what its answer must be.

    {"prompt": "What is the capital of Hungary?", "answer": "Budapest"}
    {"prompt": "Repeat: ŐSZI TŰZ", "exact": "ŐSZI TŰZ", "language": "hu"}
    {"prompt": "Extract vendor and total as JSON: ...", "json": {"vendor": "Tóth Kft.", "total": 12500}}
    {"prompt": "Describe the order as JSON: ...", "fields": {"order": {"id": "A-17"}}}
    {"prompt": "Give a date.", "pattern": "\\b\\d{4}-\\d{2}-\\d{2}\\b"}
    {"prompt": "Decline politely.", "rubric": ["declines", "is polite"]}
    {"prompt": "Who signs?", "image": "page.png", "answer": ["Ayşe Doğan", "A. Doğan"]}

Every error names the file and the line. A field that is not known is refused.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onebox.eval.pictures import picture_file_part
from onebox.eval.question import Check, Json, Question, Truth, TruthKind
from onebox.spec.errors import UnreadableError

__all__ = ["own_questions"]

_MAX_TOKENS = 512
_ROLES = ("system", "user", "assistant", "tool")
_EXPECTED = {
    "answer": TruthKind.HOLDS,
    "exact": TruthKind.TEXT,
    "json": TruthKind.JSON,
    "fields": TruthKind.FIELDS,
    "pattern": TruthKind.PATTERN,
    "calls": TruthKind.CALLS,
    "rubric": TruthKind.RUBRIC,
}
_OTHERS = ("id", "group", "prompt", "system", "messages", "image", "language", "max_tokens", "tools", "response_format")


def own_questions(path: Path) -> list[Question]:
    """The questions of a file of JSON lines; empty lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} cannot be read as UTF-8 text ({error}).") from None
    found: dict[str, Question] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _question(_parsed(line), number, path.parent)
            if question.id in found:
                raise ValueError(
                    f"the id {question.id.partition('/')[2]!r} was used before; give each question its own"
                )
        except (ValueError, UnreadableError) as error:
            raise UnreadableError(f"{path}, line {number}: {str(error).rstrip('.')}.") from None
        found[question.id] = question
    if not found:
        raise UnreadableError(f"{path} holds no question; each line is a JSON object with a prompt and its answer.")
    return list(found.values())


def _parsed(line: str) -> Json:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is not a JSON object but {_kind(value)}")
    unknown = [key for key in value if key not in _EXPECTED and key not in _OTHERS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a field; the fields are {', '.join([*_OTHERS, *_EXPECTED])}")
    return value


def _question(fields: Json, number: int, directory: Path) -> Question:
    expected = [key for key in _EXPECTED if key in fields]
    if len(expected) != 1:
        said = f"it has {' and '.join(expected)}" if expected else "it does not say what is right"
        raise ValueError(f"{said}; give one of {', '.join(_EXPECTED)}")
    body: Json = {"messages": _messages(fields, directory)}
    for key, kind in (("tools", list), ("response_format", dict)):
        if key in fields:
            body[key] = _of_kind(fields, key, kind)
    name = _of_kind(fields, "id", str, f"{number:04d}")
    group = _of_kind(fields, "group", str, expected[0])
    max_tokens = _of_kind(fields, "max_tokens", int, _MAX_TOKENS)
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    language = _of_kind(fields, "language", str, "en")
    truth = Truth(_EXPECTED[expected[0]], _VALUES[expected[0]](fields[expected[0]]), language)
    return Question(f"{Check.QUESTIONS.value}/{name}", Check.QUESTIONS, group, body, truth, max_tokens)


def _messages(fields: Json, directory: Path) -> list[Json]:
    """Of `messages` as they are, or of `prompt` with `system` and `image`."""
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("it needs either a prompt or messages")
    if "messages" in fields:
        extra = [key for key in ("system", "image") if key in fields]
        if extra:
            raise ValueError(f"{extra[0]} goes with a prompt; with messages it belongs inside them")
        messages = _of_kind(fields, "messages", list)
        if not messages or not all(isinstance(one, dict) and one.get("role") in _ROLES for one in messages):
            raise ValueError(f"messages must be a list of objects with a role of {', '.join(_ROLES)}")
        return list(messages)
    prompt: Any = _of_kind(fields, "prompt", str)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if "image" in fields:
        image = picture_file_part(directory / _of_kind(fields, "image", str))
        prompt = [image, {"type": "text", "text": prompt}]
    system = [{"role": "system", "content": _of_kind(fields, "system", str)}] if "system" in fields else []
    return [*system, {"role": "user", "content": prompt}]


def _of_kind(fields: Json, key: str, kind: type, default: Any = None) -> Any:
    value = fields.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} is {_kind(value)}, not {_NAMES[kind]}")
    return value


_NAMES: dict[type, str] = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _NAMES.get(type(value), "a number")


def _texts(value: Any) -> list[str]:
    """One string or a list of them, of which one must be given."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("what is expected must be a string or a list of strings, none of them empty")
    return texts


def _object(value: Any) -> Json:
    if not isinstance(value, dict) or not value:
        raise ValueError("json and fields must be an object with at least one key")
    return value


def _pattern(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("the pattern must be one string")
    try:
        return re.compile(value).pattern
    except re.error as error:
        raise ValueError(f"the pattern is not a regular expression of Python ({error})") from None


def _calls(value: Any) -> list[Json]:
    """Calls with name and arguments; none: no call must be made."""
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
            raise ValueError('calls must be a list of {"name": ..., "arguments": {...}}')
    return calls


_VALUES: dict[str, Callable[[Any], Any]] = {
    "answer": _texts,
    "exact": _texts,
    "json": _object,
    "fields": _object,
    "pattern": _pattern,
    "calls": _calls,
    "rubric": _texts,
}
