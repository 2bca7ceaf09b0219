"""Saved results as sides of an evaluation: a server measured once is compared with another one later.

The file brings its questions and texts, which the other side is then asked. Of two files only what both asked alike is
compared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onebox.bench.record import Server, read_value
from onebox.eval.likelihood import Likelihoods
from onebox.eval.passages import Passage
from onebox.eval.question import Question, QuestionResult
from onebox.eval.side import FORMAT, EvalSettings, EvalTarget, Side
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["SavedEval", "is_saved", "read_saved", "shared_part"]


@dataclass(frozen=True)
class SavedEval:
    """One server's result from a file."""

    settings: EvalSettings
    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]
    side: Side


def is_saved(place: str) -> bool:
    return place.endswith(".json") and Path(place).is_file()


def read_saved(target: EvalTarget) -> SavedEval:
    """Reads what `onebox eval --output` wrote of one server."""
    path = Path(target.place)
    body = _parsed(path)
    if len(body["sides"]) != 1:
        raise UsageError(f"{path} compares two servers already; give the result of one, or `onebox report` it.")
    (found,) = body["sides"]
    side = Side(
        target,
        read_value(Server | None, found["server"], path, "server"),
        list(read_value(tuple[QuestionResult, ...], found["replies"], path, "replies")),
        list(read_value(tuple[Likelihoods, ...], found["likelihoods"], path, "likelihoods")),
        dict(found["skipped"]),
        found["seconds"],
    )
    return SavedEval(
        read_value(EvalSettings, body["config"], path, "config"),
        read_value(tuple[Question, ...], body["questions"], path, "questions"),
        read_value(tuple[Passage, ...], body["passages"], path, "passages"),
        side,
    )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UnreadableError(f"{path} is not a result of this onebox's `eval --output`; ask the server again.")
    missing = [key for key in ("sides", "config", "questions", "passages") if key not in body]
    if missing:
        raise UnreadableError(f"{path} is damaged: {missing[0]!r} is missing.")
    return body


def shared_part(saved: Sequence[SavedEval]) -> list[SavedEval]:
    """What all of the results asked alike; what is left out is noted with each side."""
    if len({one.settings.thinking for one in saved}) > 1:
        raise UsageError("One of the results was asked with thinking and the other without; they are not comparable.")
    asked = [{question.id: question for question in one.questions} for one in saved]
    read = [{passage.id: passage for passage in one.passages} for one in saved]
    questions = [one for one in saved[0].questions if all(other.get(one.id) == one for other in asked)]
    passages = [one for one in saved[0].passages if all(other.get(one.id) == one for other in read)]
    if not questions and not passages:
        raise UsageError("The results have no question and no text in common, so there is nothing to compare.")
    return [_kept(one, questions, passages) for one in saved]


def _kept(saved: SavedEval, questions: Sequence[Question], passages: Sequence[Passage]) -> SavedEval:
    ids, texts = {question.id for question in questions}, {passage.id for passage in passages}
    skipped = dict(saved.side.skipped)
    for name, number in (
        ("questions", len(saved.questions) - len(questions)),
        ("texts", len(saved.passages) - len(passages)),
    ):
        if number:
            skipped[f"{number} {name}"] = "the other result does not have them"
    side = replace(
        saved.side,
        replies=[reply for reply in saved.side.replies if reply.question_id in ids],
        likelihoods=[one for one in saved.side.likelihoods if one.passage_id in texts],
        skipped=skipped,
    )
    return SavedEval(saved.settings, tuple(questions), tuple(passages), side)
