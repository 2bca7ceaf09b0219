"""One complete evaluation: generate questions, send them to each server in turn, compare, write a file.

Servers run one after the other, never at once: two builds need not fit into memory together, and neither slows the
other. An interrupted run keeps the answers received so far.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx

from onebox.bench.client import Client, Connection
from onebox.bench.machine import commit, hardware, versions
from onebox.bench.record import RunOrigin, Server, write_json
from onebox.bench.statistics import plain_json
from onebox.eval.asking import ask_all, request_of
from onebox.eval.compared import (
    CheckTally,
    TextTally,
    compare_answers,
    compare_texts,
    tally_answers,
    tally_texts,
)
from onebox.eval.facts import fact_questions, language_questions
from onebox.eval.invoices import invoice_questions, schema_questions
from onebox.eval.keys import key_questions, parse_lengths
from onebox.eval.likelihood import NotOfferedError, read_likelihoods
from onebox.eval.ocr import ocr_questions
from onebox.eval.own import own_questions
from onebox.eval.passages import Passage, file_passages, shipped_passages
from onebox.eval.pictures import picture_questions
from onebox.eval.question import Check, Json, Question, QuestionResult, Truth, TruthKind
from onebox.eval.rubric import judge_all, needs_judge
from onebox.eval.saved import SavedEval, is_saved, read_saved, shared_part
from onebox.eval.scans import scan_questions
from onebox.eval.side import FORMAT, EvalSettings, EvalTarget, Side
from onebox.eval.target import opened
from onebox.eval.tools import tool_questions
from onebox.eval.verdict import Comparison, conclude
from onebox.spec.authorization import authorization
from onebox.spec.errors import UsageError

__all__ = ["FORMAT", "LIKELIHOOD", "EvalRun", "EvalSettings", "EvalTarget", "Evaluation", "Side", "write_eval"]

LIKELIHOOD = "likelihood"
"""The check without questions: it measures how well texts are predicted."""
_WHOLE_S = 1800.0


@dataclass(frozen=True)
class EvalRun(RunOrigin):
    """The result file. Figures in `tallies`, `texts` and `comparison` are computed from the replies and likelihoods."""

    commit: str
    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]
    sides: tuple[Json, ...]
    tallies: tuple[tuple[CheckTally, ...], ...]
    """One entry per side."""
    texts: tuple[TextTally | None, ...]
    comparison: Comparison | None
    failures: tuple[Json, ...]
    """Every failure: side, question, reason, status and message; first in every report."""
    interrupted: bool = False
    judge: Json | None = None
    """The server that judged answers by a rubric: its target, and what it said of itself."""
    format: str = FORMAT

    @property
    def is_success(self) -> bool:
        has_any = any(tallies for tallies in self.tallies) or any(self.texts)
        return has_any and not self.failures and not self.interrupted


def write_eval(run: EvalRun, path: Path) -> None:
    write_json(plain_json(run), path)


OnProgress = Callable[[str, int, int], None]
"""Called with the current activity, the amount done and the total."""


class Evaluation:
    """A running evaluation."""

    def __init__(self, targets: Sequence[EvalTarget], settings: EvalSettings, judge: EvalTarget | None = None) -> None:
        self.settings = settings
        self.sides = [Side(target) for target in targets]
        saved = {number: read_saved(target) for number, target in enumerate(targets) if is_saved(target.place)}
        self.judge = Side(judge) if judge else None
        self.questions: list[Question] = []
        self.passages: list[Passage] = []
        self._own = own_questions(Path(settings.questions)) if settings.questions else []
        self._pictures = picture_questions(Path(settings.pictures)) if settings.pictures else []
        if saved:
            self._take_saved(saved)
        _refuse_wrong_judge(self._own or self.questions, judge, is_asking=len(saved) < len(targets))
        self._hardware = hardware()
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        if LIKELIHOOD in settings.checks and not saved:
            own = [passage for path in settings.texts for passage in file_passages(Path(path))]
            self.passages = own or shipped_passages()

    def _take_saved(self, saved: dict[int, SavedEval]) -> None:
        """Takes the answers of saved results, and their questions for the other side."""
        kept = shared_part(list(saved.values()))
        for number, one in zip(saved, kept, strict=True):
            self.sides[number] = one.side
        self.questions, self.passages = list(kept[0].questions), list(kept[0].passages)
        asked = kept[0].settings
        self.settings = replace(asked, concurrency=self.settings.concurrency, stall_s=self.settings.stall_s)

    def run(self, report: OnProgress) -> None:
        """Runs all checks on every side that is not saved. An interruption keeps earlier replies."""
        for side in self.sides:
            if is_saved(side.target.place):
                continue
            began = time.perf_counter()
            report(f"{side.target.name}: starting", 0, 1)
            with opened(side.target.place, side.target.serve_arguments) as url:
                report(f"{side.target.name}: starting", 1, 1)
                try:
                    asyncio.run(self._side(side, url, report))
                finally:
                    side.seconds = round(time.perf_counter() - began, 2)
        if self.judge is not None and self._num_unjudged:
            with opened(self.judge.target.place, self.judge.target.serve_arguments) as url:
                asyncio.run(self._judge(self.judge, url, report))

    @property
    def _num_unjudged(self) -> int:
        """Answers that wait for a judge; those of a saved result have their judgement."""
        return sum(
            reply.answer is not None and reply.judgement is None for side in self.sides for reply in side.replies
        )

    @property
    def has_answers(self) -> bool:
        return any(side.replies or side.likelihoods for side in self.sides)

    async def _side(self, side: Side, url: str, report: OnProgress) -> None:
        connection = Connection(url, side.target.api_key, side.target.model, stall_s=self.settings.stall_s)
        async with Client(connection) as client:
            side.server = server = await client.discover()
            if not self.questions:
                report(f"{side.target.name}: making questions", 0, 1)
                self.questions = await self._make_questions(client, server)
                report(f"{side.target.name}: making questions", 1, 1)
            await self._ask(client, side, server, report)
            if self.passages:
                await self._predict(client, side, server, report)

    async def _judge(self, judge: Side, url: str, report: OnProgress) -> None:
        """Has the answers to questions with a rubric judged and puts the judgements in place."""
        by_id = {question.id: question for question in self.questions if needs_judge(question)}
        places = [
            (side, place)
            for side in self.sides
            for place, reply in enumerate(side.replies)
            if reply.question_id in by_id and reply.answer is not None and reply.judgement is None
        ]
        asked = [(by_id[side.replies[place].question_id], side.replies[place]) for side, place in places]
        done = 0

        def keep(number: int, reply: QuestionResult) -> None:
            nonlocal done
            side, place = places[number]
            side.replies[place], done = reply, done + 1
            report("judge: answers", done, len(asked))

        connection = Connection(url, judge.target.api_key, judge.target.model, stall_s=self.settings.stall_s)
        async with Client(connection) as client:
            judge.server = await client.discover()
            report("judge: answers", 0, len(asked))
            await judge_all(client, asked, self.settings.manner, keep)

    async def _make_questions(self, client: Client, server: Server) -> list[Question]:
        """All questions of the chosen checks; lengths are in the first server's tokens."""
        settings, found = self.settings, []
        makers: dict[Check, Callable[[], list[Question]]] = {
            Check.FACTS: fact_questions,
            Check.LANGUAGES: language_questions,
            Check.INVOICES: lambda: invoice_questions(settings.count, settings.seed),
            Check.SCHEMA: lambda: schema_questions(settings.count, settings.seed),
            Check.TOOLS: lambda: tool_questions(settings.count, settings.seed),
            Check.OCR: lambda: ocr_questions(settings.count, settings.seed),
            Check.SCANS: lambda: scan_questions(settings.count, settings.seed),
            Check.QUESTIONS: lambda: self._own,
            Check.PICTURES: lambda: self._pictures,
        }
        for check in Check:
            if check.value not in settings.checks:
                continue
            if check is Check.KEYS:
                found += await self._make_keys(client, server)
            else:
                found += makers[check]()
        return found

    async def _make_keys(self, client: Client, server: Server) -> list[Question]:
        async def count(body: Json) -> int | None:
            blank = Truth(TruthKind.HOLDS, [])
            return await client.count_prompt(
                request_of(Question("", Check.KEYS, "", body, blank), self.settings.manner)
            )

        lengths = parse_lengths(self.settings.lengths, server.max_model_len).fitting
        return await key_questions(lengths, self.settings.repeats, self.settings.seed, count)

    def _askable(self, side: Side, server: Server) -> list[Question]:
        """The questions that this server supports; the others are noted with the reason."""
        questions = self.questions
        if "image" not in server.modalities:
            for check in dict.fromkeys(question.check for question in questions if question.has_picture):
                side.skipped[_with_pictures(check)] = "the server takes no images"
            questions = [question for question in questions if not question.has_picture]
        too_long = parse_lengths(self.settings.lengths, server.max_model_len).too_long
        if Check.KEYS.value in self.settings.checks and too_long:
            named = ", ".join(f"{length:,}" for length in too_long)
            reason = f"the context of {server.max_model_len:,} tokens has no room for them"
            side.skipped[f"keys at {named} tokens"] = reason
            beginnings = tuple(f"{Check.KEYS.value}/{length}/" for length in too_long)
            questions = [question for question in questions if not question.id.startswith(beginnings)]
        return questions

    async def _ask(self, client: Client, side: Side, server: Server, report: OnProgress) -> None:
        questions = self._askable(side, server)

        def keep(reply: QuestionResult) -> None:
            side.replies.append(reply)
            report(f"{side.target.name}: questions", len(side.replies), len(questions))

        report(f"{side.target.name}: questions", 0, len(questions))
        await ask_all(client, questions, self.settings.manner, keep)

    async def _predict(self, client: Client, side: Side, server: Server, report: OnProgress) -> None:
        """Scores passages one at a time: each is one prompt, measured by the server's log-probabilities."""
        headers = authorization(side.target.api_key)
        async with httpx.AsyncClient(base_url=client.url, headers=headers, timeout=_WHOLE_S) as http:
            for number, passage in enumerate(self.passages):
                report(f"{side.target.name}: texts", number, len(self.passages))
                ids = await client.token_ids(passage.text)
                try:
                    found = await read_likelihoods(http, server.model, passage, ids, self.settings.num_top)
                except NotOfferedError as error:
                    side.skipped[LIKELIHOOD] = f"the server returns no log-probabilities of a prompt ({error})"
                    return
                side.likelihoods.append(found)
            report(f"{side.target.name}: texts", len(self.passages), len(self.passages))

    def result(self, command: Sequence[str], *, interrupted: bool = False) -> EvalRun:
        """The current state as a result file."""
        failures = [failure for side in self.sides for failure in _failures(side)]
        comparison = None
        if len(self.sides) == 2:
            first, second = self.sides
            skipped = [f"{what} ({why})" for side in self.sides for what, why in side.skipped.items()]
            comparison = conclude(
                compare_answers(self.questions, first.replies, second.replies),
                compare_texts(first.likelihoods, second.likelihoods),
                len(failures),
                list(dict.fromkeys(skipped)),
            )
        return EvalRun(
            started=self._started,
            command=tuple(command),
            config=asdict(self.settings),
            versions=versions(),
            hardware=self._hardware,
            commit=commit(),
            questions=tuple(self.questions),
            passages=tuple(self.passages),
            # API keys are not written to files.
            sides=tuple(asdict(replace(side, target=replace(side.target, api_key=None))) for side in self.sides),
            tallies=tuple(tuple(tally_answers(self.questions, side.replies)) for side in self.sides),
            texts=tuple(tally_texts(self.passages, side.likelihoods) for side in self.sides),
            comparison=comparison,
            failures=tuple(failures),
            interrupted=interrupted,
            judge=_judge_record(self.judge),
        )


def _with_pictures(check: Check) -> str:
    return "questions with an image" if check is Check.QUESTIONS else check.value


def _refuse_wrong_judge(questions: Sequence[Question], judge: EvalTarget | None, *, is_asking: bool) -> None:
    """Early check: a rubric needs a judge if answers are still to come, and a judge a rubric."""
    needing = [question for question in questions if needs_judge(question) and is_asking]
    if needing and judge is None:
        named = needing[0].id.partition("/")[2]
        raise UsageError(f"Question {named!r} has a rubric, which another server must judge; give --judge URL.")
    if judge is not None and not needing:
        raise UsageError("--judge is given, but no question that is asked has a rubric.")


def _judge_record(judge: Side | None) -> Json | None:
    if judge is None:
        return None
    return {
        "target": asdict(replace(judge.target, api_key=None)),
        "server": asdict(judge.server) if judge.server else None,
    }


def _failures(side: Side) -> list[Json]:
    named = [(reply.question_id, reply.failure) for reply in side.replies]
    named += [(f"text {one.passage_id}", one.failure) for one in side.likelihoods]
    return [
        {"side": side.target.name, "asked": asked, **asdict(failure)} for asked, failure in named if failure is not None
    ]
