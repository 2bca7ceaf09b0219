"""The verdict on two servers, with its confidence and the checks that did not run.

"Worse" requires significance at 95% after adjusting for the number of comparisons (Holm). "No difference seen" requires
a sample that bounds the loss: at most a quarter of the answers and a tenth of the perplexity. A sample that bounds
neither is "too few to tell", with how many it takes. Failures are listed first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from onebox.bench.statistics import CONFIDENCE, adjusted, mcnemar
from onebox.eval.compared import ALL, Pair, TextPair, most_worse
from onebox.eval.weighted import FEWEST_ITEMS

__all__ = ["Comparison", "ComparisonOutcome", "conclude"]

_MOST_ANSWERS_LOST = 0.25
_MOST_PERPLEXITY_GAINED = 0.10
_LEVEL = 1 - CONFIDENCE
_MOST_QUESTIONS = 100_000


class ComparisonOutcome(StrEnum):
    SAME = "no difference seen"
    WORSE = "B is worse"
    BETTER = "B is better"
    MIXED = "B is worse in some and better in others"
    TOO_FEW = "too few to tell"
    """No significant difference, and too few questions or passages to rule a large one out."""
    UNKNOWN = "no verdict"
    """No question answered by both, or none answered right and no text predicted: no loss can be measured."""


@dataclass(frozen=True)
class Comparison:
    """B compared with A."""

    outcome: ComparisonOutcome
    sentences: tuple[str, ...]
    pairs: tuple[Pair, ...]
    texts: TextPair | None


def conclude(pairs: Sequence[Pair], texts: TextPair | None, num_failures: int, skipped: Sequence[str]) -> Comparison:
    """Adjusts the p-values and derives the verdict."""
    pairs, texts, num_tests = _adjusted(pairs, texts)
    sentences = []
    if num_failures:
        sentences.append(f"{num_failures} requests failed and are not part of this verdict. See the failures.")
    worse, better = _told_apart(pairs, texts, True), _told_apart(pairs, texts, False)
    if worse:
        sentences.append(f"B is worse on {'; '.join(worse)}.")
    if better:
        sentences.append(f"B is better on {'; '.join(better)}.")
    shortages = [] if worse or better else _shortages(pairs, texts, num_tests)
    sentences += shortages
    can_lose = bool(pairs) and pairs[-1].num_pairs > pairs[-1].neither
    if can_lose:
        sentences.append(_answers_sentence(pairs[-1], is_settled=bool(worse or better or shortages)))
    elif pairs:
        sentences.append(
            f"Neither got any of {pairs[-1].num_pairs} answers right, so these show no difference either way."
        )
    if texts:
        sentences.append(_texts_sentence(texts))
    if skipped:
        sentences.append(f"Not compared: {'; '.join(skipped)}.")
    has_any = can_lose or texts is not None
    return Comparison(_outcome(worse, better, shortages, has_any), tuple(sentences), tuple(pairs), texts)


def _adjusted(pairs: Sequence[Pair], texts: TextPair | None) -> tuple[list[Pair], TextPair | None, int]:
    """The rows with p-values adjusted for the number of tests, and this number.

    What could not become significant whatever the answers were is no test and takes no part of the level; the row of
    all answers is one only beside several checks.
    """
    rows = [number for number, pair in enumerate(pairs) if mcnemar(pair.num_pairs, 0) < _LEVEL]
    rows = [number for number in rows if pairs[number].check != ALL or len(pairs) > 2]
    values = [pairs[number].p_value for number in rows]
    has_texts = texts is not None and texts.change.is_known
    corrected = adjusted([*values, texts.p_value] if texts and has_texts else values)
    found = list(pairs)
    for number, value in zip(rows, corrected, strict=False):
        found[number] = replace(pairs[number], p_value=value)
    if len(pairs) == 2 and rows:
        found[-1] = replace(pairs[-1], p_value=found[0].p_value)
    return found, replace(texts, p_value=corrected[-1]) if texts and has_texts else texts, len(corrected)


def _told_apart(pairs: Sequence[Pair], texts: TextPair | None, is_worse: bool) -> list[str]:
    """Checks on which the second is significantly worse (or better)."""
    sign = -1 if is_worse else 1
    found = [
        f"{pair.check} ({abs(pair.difference.estimate):.1%} of {pair.num_pairs} questions, p = {pair.p_value:.2g})"
        for pair in pairs
        if pair.p_value < _LEVEL and sign * pair.difference.estimate > 0
    ]
    if texts and texts.p_value < _LEVEL and sign * (texts.perplexity_ratio.estimate - 1) < 0:
        ratio = texts.perplexity_ratio
        found.append(
            f"predicting text (perplexity x {ratio.estimate:.4f}, {ratio.low:.4f} to {ratio.high:.4f}, "
            f"p = {texts.p_value:.2g})"
        )
    return found


def _shortages(pairs: Sequence[Pair], texts: TextPair | None, num_tests: int) -> list[str]:
    """Sentences on samples that would have missed a large loss, with the size that would not."""
    found = []
    overall = pairs[-1] if pairs else None
    if overall and overall.num_pairs > overall.neither and overall.at_most_worse > _MOST_ANSWERS_LOST:
        found.append(
            f"{overall.num_pairs} answers are too few to tell: B may answer {overall.at_most_worse:.0%} fewer of them "
            f"right. It takes about {_questions_needed(overall):,} questions."
        )
    if texts and not texts.change.is_known:
        found.append(
            f"{texts.passages} {_passages(texts.passages)} too few to tell: it takes {FEWEST_ITEMS} or more to "
            f"measure a spread, and here B's perplexity is {texts.perplexity_ratio.estimate:.4f} times A's."
        )
    elif texts and texts.perplexity_ratio.high > 1 + _MOST_PERPLEXITY_GAINED:
        found.append(
            f"{texts.passages} {_passages(texts.passages)} too few to tell: B's perplexity may be "
            f"{texts.perplexity_ratio.high - 1:.0%} higher. It takes about {_passages_needed(texts, num_tests):,}."
        )
    return found


def _passages(count: int) -> str:
    return "passage is" if count == 1 else "passages are"


def _questions_needed(pair: Pair) -> int:
    """The smallest number of questions that, with the same shares, bounds the loss or shows a difference."""
    count = pair.num_pairs
    while count < _MOST_QUESTIONS:
        count += max(1, count // 20)
        only_first, only_second = (round(part * count / pair.num_pairs) for part in (pair.only_first, pair.only_second))
        is_bounded = most_worse(only_first, only_second, count) <= _MOST_ANSWERS_LOST
        if is_bounded or mcnemar(only_first, only_second) < _LEVEL:
            break
    return count


def _passages_needed(texts: TextPair, num_tests: int) -> int:
    """The number of passages that, with the same spread, bounds the loss or shows a difference."""
    seen = texts.change.estimate
    half_width = max(math.log1p(_MOST_PERPLEXITY_GAINED) - seen, abs(seen))
    return max(texts.passages + 1, texts.change.num_needed(half_width, 1 - _LEVEL / num_tests))


def _answers_sentence(overall: Pair, *, is_settled: bool) -> str:
    """Sentence on all answers together."""
    bound = f"B answers at most {overall.at_most_worse:.1%} fewer of them right with {CONFIDENCE:.0%} confidence"
    counts = f"{overall.only_first} right only with A, {overall.only_second} only with B"
    seen = "Over all" if is_settled else "No difference seen on"
    same = f"{overall.same_text} are identical"
    return f"{seen} {overall.num_pairs} answers ({counts}; {same}): {bound}."


def _texts_sentence(texts: TextPair) -> str:
    if texts.divergence.estimate == 0 and texts.same_likeliest.estimate == 1:
        return f"Over {texts.tokens:,} tokens of text both predict the same, to the last reported digit."
    said = (
        f"Over {texts.tokens:,} tokens of text: divergence at least {texts.divergence.estimate:.5f} nats per token, "
        f"the same top token at {texts.same_likeliest.estimate:.2%}"
    )
    if not texts.change.is_known:
        return f"{said}."
    return f"{said}; B's perplexity is at most {max(0.0, texts.perplexity_ratio.high - 1):.2%} higher."


def _outcome(worse: Sequence[str], better: Sequence[str], shortages: Sequence[str], has_any: bool) -> ComparisonOutcome:
    if not has_any:
        return ComparisonOutcome.UNKNOWN
    if worse and better:
        return ComparisonOutcome.MIXED
    if worse:
        return ComparisonOutcome.WORSE
    if better:
        return ComparisonOutcome.BETTER
    return ComparisonOutcome.TOO_FEW if shortages else ComparisonOutcome.SAME
