"""Scores of one server's replies, and the comparison of two servers. Arithmetic only; `verdict.py` formulates it.

Only answered questions count: failures are counted separately, and a pair with a failure is excluded.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onebox.bench.statistics import (
    Interval,
    mcnemar,
    paired_difference,
    score_interval,
    share_interval,
)
from onebox.eval.likelihood import Likelihoods, agreement
from onebox.eval.passages import Passage
from onebox.eval.question import Question, QuestionResult
from onebox.eval.weighted import WeightedMean, weighted_mean

__all__ = [
    "ALL",
    "CheckTally",
    "Pair",
    "TextPair",
    "TextTally",
    "compare_answers",
    "compare_texts",
    "most_worse",
    "tally_answers",
    "tally_texts",
]

ALL = "all answers"
_ONE_SIDED = 1.6448536269514722
"""The normal quantile below which 95% lie."""


@dataclass(frozen=True)
class CheckTally:
    """Scores of one check (or all) on one server."""

    check: str
    asked: int
    answered: int
    right: int
    cut: int
    """Answers that reached their token limit; they are scored as they are."""
    share: Interval
    scores: dict[str, float]
    """Means of the partial scores over answers that have them."""
    groups: dict[str, tuple[int, int]]
    """Subgroup -> right, answered."""


@dataclass(frozen=True)
class Pair:
    """One check (or all) on both servers, over questions that both answered."""

    check: str
    num_pairs: int
    both: int
    only_first: int
    only_second: int
    same_text: int
    """Pairs with identical answers."""
    difference: Interval
    """Share of right answers of the second minus that of the first."""
    at_most_worse: float
    """Upper bound on how much lower the second's share is, with 95% confidence."""
    p_value: float
    """Exact (McNemar), two-sided, adjusted for the number of comparisons (Holm)."""

    @property
    def neither(self) -> int:
        """Pairs of two wrong answers."""
        return self.num_pairs - self.both - self.only_first - self.only_second


@dataclass(frozen=True)
class TextTally:
    """All passages on one server."""

    passages: int
    tokens: int
    perplexity: Interval
    bits_per_byte: float
    kinds: dict[str, float]
    """Perplexity by kind of text."""


@dataclass(frozen=True)
class TextPair:
    """Passages that both servers predicted with the same tokens."""

    passages: int
    other_tokens: int
    """Passages that the two tokenize differently, which are excluded."""
    tokens: int
    perplexity_ratio: Interval
    """second / first; above 1 the second predicts worse. Like every interval here, without ends below 3 passages."""
    divergence: Interval
    """Mean KL(first || second) in nats per token, over the shared top tokens: a lower bound."""
    same_likeliest: Interval
    """Share of positions with the same top token."""
    p_value: float
    """Of the difference in loss, by Student's t over whole passages; adjusted like those of the answers."""
    change: WeightedMean
    """Loss of the second minus that of the first, in nats per token."""


def tally_answers(questions: Sequence[Question], replies: Iterable[QuestionResult]) -> list[CheckTally]:
    """A row for each check with replies, then one for all."""
    by_id = {reply.question_id: reply for reply in replies}
    asked = [question for question in questions if question.id in by_id]
    rows = [
        _tally(check.value, [question for question in asked if question.check is check], by_id)
        for check in dict.fromkeys(question.check for question in asked)
    ]
    return [*rows, _tally(ALL, asked, by_id)] if rows else []


def _tally(name: str, questions: Sequence[Question], by_id: dict[str, QuestionResult]) -> CheckTally:
    groups: dict[str, tuple[int, int]] = {}
    scores: dict[str, list[float]] = {}
    right = answered = cut = 0
    for question in questions:
        reply = by_id[question.id]
        if reply.judgement is None or reply.answer is None:
            continue
        is_right = reply.judgement.right
        answered, right, cut = answered + 1, right + is_right, cut + (reply.answer.finish_reason == "length")
        had = groups.get(question.group, (0, 0))
        groups[question.group] = (had[0] + is_right, had[1] + 1)
        for key, value in reply.judgement.scores.items():
            scores.setdefault(key, []).append(value)
    means = {} if name == ALL else {key: sum(values) / len(values) for key, values in scores.items()}
    finer = {} if name == ALL else groups
    return CheckTally(name, len(questions), answered, right, cut, share_interval(right, answered), means, finer)


def compare_answers(
    questions: Sequence[Question], first: Iterable[QuestionResult], second: Iterable[QuestionResult]
) -> list[Pair]:
    """A row for each check with pairs, then one for all; p-values are not adjusted yet."""
    left, right = ({reply.question_id: reply for reply in replies} for replies in (first, second))
    rows: dict[str, list[tuple[QuestionResult, QuestionResult]]] = {}
    for question in questions:
        one, other = left.get(question.id), right.get(question.id)
        if one and other and one.judgement and other.judgement:
            rows.setdefault(question.check.value, []).append((one, other))
    if rows:
        rows[ALL] = [pair for pairs in rows.values() for pair in pairs]
    return [_pair(name, pairs) for name, pairs in rows.items()]


def _pair(name: str, pairs: Sequence[tuple[QuestionResult, QuestionResult]]) -> Pair:
    outcomes = [(bool(a.judgement and a.judgement.right), bool(b.judgement and b.judgement.right)) for a, b in pairs]
    only_first, only_second = outcomes.count((True, False)), outcomes.count((False, True))
    return Pair(
        check=name,
        num_pairs=len(pairs),
        both=outcomes.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        same_text=sum(_words(one) == _words(other) for one, other in pairs),
        difference=paired_difference(only_first, only_second, len(pairs)),
        at_most_worse=most_worse(only_first, only_second, len(pairs)),
        p_value=mcnemar(only_first, only_second),
    )


def most_worse(only_first: int, only_second: int, num_pairs: int) -> float:
    """Upper bound on how much lower the second's share of right answers is, with 95% confidence."""
    return max(0.0, -score_interval(only_first, only_second, num_pairs, _ONE_SIDED).low)


def _words(reply: QuestionResult) -> object:
    return (reply.answer.text, reply.answer.reasoning, reply.answer.calls) if reply.answer else None


def tally_texts(passages: Sequence[Passage], found: Iterable[Likelihoods]) -> TextTally | None:
    """None if no passage was predicted."""
    by_id = {passage.id: passage for passage in passages}
    whole = [one for one in found if one.failure is None and one.places]
    if not whole:
        return None
    losses, counts = [one.loss for one in whole], [len(one.places) for one in whole]
    num_bytes = sum(len(by_id[one.passage_id].text.encode()) for one in whole)
    kinds: dict[str, list[int]] = {}
    for index, one in enumerate(whole):
        kinds.setdefault(by_id[one.passage_id].kind, []).append(index)
    return TextTally(
        len(whole),
        sum(counts),
        _exponential(weighted_mean(losses, counts).interval()),
        sum(losses) / math.log(2) / num_bytes,
        {
            kind: math.exp(sum(losses[index] for index in chosen) / sum(counts[index] for index in chosen))
            for kind, chosen in kinds.items()
        },
    )


def compare_texts(first: Iterable[Likelihoods], second: Iterable[Likelihoods]) -> TextPair | None:
    """None if no passage was predicted by both with the same tokens."""
    others = {one.passage_id: one for one in second if one.failure is None and one.places}
    both = [(one, others[one.passage_id]) for one in first if one.places and one.passage_id in others]
    compared = [agreement(one, other) for one, other in both]
    found = [one for one in compared if one is not None]
    if not found:
        return None
    counts = [one.num_tokens for one in found]
    change = weighted_mean([one.second_loss - one.first_loss for one in found], counts)
    return TextPair(
        passages=len(found),
        other_tokens=len(compared) - len(found),
        tokens=sum(counts),
        perplexity_ratio=_exponential(change.interval()),
        divergence=weighted_mean([one.divergence for one in found], counts).positive_interval(),
        same_likeliest=weighted_mean([one.num_same for one in found], counts).share_interval(),
        p_value=change.p_value,
        change=change,
    )


def _exponential(interval: Interval) -> Interval:
    return Interval(*(math.exp(min(end, 700.0)) for end in (interval.estimate, interval.low, interval.high)))
