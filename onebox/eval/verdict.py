"""The verdict on two servers, with its confidence and the checks that did not run.

"Worse" requires significance at 95% after adjusting for the number of comparisons (Holm). Without a significant
difference the verdict states how large a difference could have been missed. Failures are listed first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from onebox.bench.statistics import CONFIDENCE, adjusted
from onebox.eval.compared import Pair, TextPair

__all__ = ["Comparison", "ComparisonOutcome", "conclude"]


class ComparisonOutcome(StrEnum):
    SAME = "no difference seen"
    WORSE = "B is worse"
    BETTER = "B is better"
    MIXED = "B is worse in some and better in others"
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
    pairs, texts = _adjusted(pairs, texts)
    sentences = []
    if num_failures:
        sentences.append(f"{num_failures} requests failed and are not part of this verdict. See the failures.")
    worse, better = _told_apart(pairs, texts, True), _told_apart(pairs, texts, False)
    if worse:
        sentences.append(f"B is worse on {'; '.join(worse)}.")
    if better:
        sentences.append(f"B is better on {'; '.join(better)}.")
    can_lose = bool(pairs) and pairs[-1].both + pairs[-1].only_first + pairs[-1].only_second > 0
    if can_lose:
        sentences.append(_answers_sentence(pairs[-1], is_settled=bool(worse or better)))
    elif pairs:
        sentences.append(
            f"Neither got any of {pairs[-1].num_pairs} answers right, so these show no difference either way."
        )
    if texts:
        sentences.append(_texts_sentence(texts))
    if skipped:
        sentences.append(f"Not compared: {'; '.join(skipped)}.")
    return Comparison(_outcome(worse, better, can_lose or texts is not None), tuple(sentences), tuple(pairs), texts)


def _adjusted(pairs: Sequence[Pair], texts: TextPair | None) -> tuple[list[Pair], TextPair | None]:
    values = [pair.p_value for pair in pairs] + ([texts.p_value] if texts else [])
    corrected = adjusted(values)
    rows = [replace(pair, p_value=value) for pair, value in zip(pairs, corrected[: len(pairs)], strict=True)]
    return rows, replace(texts, p_value=corrected[-1]) if texts else None


def _told_apart(pairs: Sequence[Pair], texts: TextPair | None, is_worse: bool) -> list[str]:
    """Checks on which the second is significantly worse (or better)."""
    sign = -1 if is_worse else 1
    found = [
        f"{pair.check} ({abs(pair.difference.estimate):.1%} of {pair.num_pairs} questions, p = {pair.p_value:.2g})"
        for pair in pairs
        if pair.p_value < 1 - CONFIDENCE and sign * pair.difference.estimate > 0
    ]
    if texts and texts.p_value < 1 - CONFIDENCE and sign * (texts.perplexity_ratio.estimate - 1) < 0:
        ratio = texts.perplexity_ratio
        found.append(
            f"predicting text (perplexity x {ratio.estimate:.4f}, {ratio.low:.4f} to {ratio.high:.4f}, "
            f"p = {texts.p_value:.2g})"
        )
    return found


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
    return (
        f"Over {texts.tokens:,} tokens of text: divergence at least {texts.divergence.estimate:.5f} nats per token, "
        f"the same top token at {texts.same_likeliest.estimate:.2%}; B's perplexity is at most "
        f"{max(0.0, texts.perplexity_ratio.high - 1):.2%} higher."
    )


def _outcome(worse: Sequence[str], better: Sequence[str], has_any: bool) -> ComparisonOutcome:
    if not has_any:
        return ComparisonOutcome.UNKNOWN
    if worse and better:
        return ComparisonOutcome.MIXED
    if worse:
        return ComparisonOutcome.WORSE
    return ComparisonOutcome.BETTER if better else ComparisonOutcome.SAME
