"""Data types of an evaluation: a question with its truth, an answer, and its score.

A question holds the complete request, so that two servers get the same bytes and a reader of the file can repeat it.
Independent of HTTP and of the scoring rules.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from onebox.bench.record import Failure

__all__ = ["Check", "GivenAnswer", "Judgement", "Question", "QuestionResult", "Truth", "TruthKind", "one_turn"]


Json = dict[str, Any]


class Check(StrEnum):
    """The checks, in the order of the report."""

    FACTS = "facts"
    LANGUAGES = "languages"
    INVOICES = "invoices"
    """JSON requested in the prompt."""
    SCHEMA = "schema"
    """JSON requested by `response_format`."""
    TOOLS = "tools"
    KEYS = "keys"
    """A key hidden in a long text."""
    OCR = "ocr"
    """A document image to read."""
    SCANS = "scans"
    """The same as a noisy scan."""
    QUESTIONS = "questions"
    """The user's own questions."""
    PICTURES = "pictures"
    """The user's own pictures."""


class TruthKind(StrEnum):
    """How an answer is compared with the truth (see `judge.py`)."""

    HOLDS = "holds"
    """The answer contains one of the values as whole words, ignoring letter case."""
    TEXT = "text"
    """The answer is exactly one of the values."""
    JSON = "json"
    """The answer is JSON with these values."""
    FIELDS = "fields"
    """The answer is JSON that holds at least these values."""
    PATTERN = "pattern"
    """The answer holds a match of this regular expression."""
    TRANSCRIPT = "transcript"
    """The answer is this text, up to a few characters."""
    RUBRIC = "rubric"
    """Another server finds that the answer meets these criteria (see `rubric.py`)."""
    CALLS = "calls"
    """The answer calls these tools with these arguments; an empty list means no call."""


def one_turn(text: str, **more: Any) -> Json:
    """The body of a single-turn question."""
    return {"messages": [{"role": "user", "content": text}], **more}


@dataclass(frozen=True)
class Truth:
    """The expected answer. `value`: a list of texts, a JSON object, or a list of calls with name and arguments."""

    kind: TruthKind
    value: Any
    language: str = "en"
    """Language whose capitalization rules apply."""
    schema: Json | None = None
    """Schema of a JSON answer; None: no schema was requested."""


@dataclass(frozen=True)
class Question:
    """One chat request. `body` has its messages and extra fields; model and sampling are set by the run."""

    id: str
    check: Check
    group: str
    """Subgroup within the check: a language, a length and depth."""
    body: Json
    truth: Truth
    max_tokens: int = 256

    @property
    def has_picture(self) -> bool:
        contents = [message.get("content") for message in self.body["messages"]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


@dataclass(frozen=True)
class GivenAnswer:
    """The server's answer."""

    text: str
    calls: tuple[Json, ...] = ()
    """Name and parsed arguments of each tool call; arguments that are not a JSON object stay a string."""
    finish_reason: str = ""
    reasoning: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    retries: int = 0
    """Number of earlier refusals because the server was busy."""


@dataclass(frozen=True)
class Judgement:
    """Whether an answer is right, with partial scores between 0 and 1 if the rule has any."""

    right: bool
    scores: dict[str, float] = field(default_factory=dict)
    why: str = ""
    """Short description of the error."""


@dataclass(frozen=True)
class QuestionResult:
    """Result of one question on one server: an answer and its score, or a failure, which may be that of the judge."""

    question_id: str
    answer: GivenAnswer | None = None
    judgement: Judgement | None = None
    failure: Failure | None = None
