"""The nouns of an evaluation: a question with its truth, an answer, and what judging it came to.

A question holds what is sent, whole, so that two servers get the same bytes and a reader of the file can ask again.
Knows nothing about HTTP, and nothing about how answers are judged.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from onebox.bench.record import Failure

__all__ = ["Check", "GivenAnswer", "Judgement", "Question", "QuestionResult", "Truth", "TruthKind", "one_turn"]


Json = dict[str, Any]


class Check(StrEnum):
    """What is looked at. The order is the order of the report."""

    FACTS = "facts"
    LANGUAGES = "languages"
    INVOICES = "invoices"
    """JSON asked for in words."""
    SCHEMA = "schema"
    """JSON asked for by `response_format`."""
    TOOLS = "tools"
    KEYS = "keys"
    """A key hidden in a long text."""
    OCR = "ocr"
    """A drawn document to be read."""


class TruthKind(StrEnum):
    """How an answer is compared with the truth (see `judge.py`)."""

    HOLDS = "holds"
    """One of the values stands in the answer as whole words; letter case does not count."""
    TEXT = "text"
    """The answer is one of the values, letter for letter."""
    JSON = "json"
    """The answer is JSON with these values."""
    CALLS = "calls"
    """The answer calls these tools with these arguments; with none, it calls nothing."""


def one_turn(text: str, **more: Any) -> Json:
    """The body of a question in one turn."""
    return {"messages": [{"role": "user", "content": text}], **more}


@dataclass(frozen=True)
class Truth:
    """What is right. `value`: a list of texts, a JSON object, or a list of calls with name and arguments."""

    kind: TruthKind
    value: Any
    language: str = "en"
    """Whose rules for capitals hold."""
    schema: Json | None = None
    """What a JSON answer must follow; None: no schema was asked for."""


@dataclass(frozen=True)
class Question:
    """One chat request. `body` has its messages and whatever goes with them; model and sampling are the run's."""

    id: str
    check: Check
    group: str
    """A finer division within the check: a language, a length and depth."""
    body: Json
    truth: Truth
    max_tokens: int = 256


@dataclass(frozen=True)
class GivenAnswer:
    """The server's answer."""

    text: str
    calls: tuple[Json, ...] = ()
    """Name and parsed arguments of each tool call; arguments that are no JSON object stay a text."""
    finish_reason: str = ""
    reasoning: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    retries: int = 0
    """How often the server had refused before because it was busy."""


@dataclass(frozen=True)
class Judgement:
    """Whether an answer is right, with finer scores between 0 and 1 where there are any."""

    right: bool
    scores: dict[str, float] = field(default_factory=dict)
    why: str = ""
    """What is wrong, in a few words."""


@dataclass(frozen=True)
class QuestionResult:
    """What became of one question at one server: an answer and its judgement, or a failure and neither."""

    question_id: str
    answer: GivenAnswer | None = None
    judgement: Judgement | None = None
    failure: Failure | None = None
