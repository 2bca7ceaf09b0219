"""Choices of the scheduler, as functions of plain values: who goes first, whom to preempt."""

from collections.abc import Callable
from typing import TypeVar

from onebox.spec.kv import PAGE_TOKENS

__all__ = ["MAX_OVERTAKEN", "fewest", "prompt_shares", "shortest_first"]

MAX_OVERTAKEN = 16
"""So many later requests may go before an earlier one of the same client, because they have less to compute."""

T = TypeVar("T")


def fewest(candidates: list[T], is_enough: Callable[[list[T]], bool]) -> list[T] | None:
    """Candidates that are enough, none of them needless, earlier ones preferred; None where all are not enough."""
    chosen: list[T] = []
    while not is_enough(chosen):
        if len(chosen) == len(candidates):
            return None
        chosen.append(candidates[len(chosen)])
    for candidate in chosen[::-1]:
        others = [other for other in chosen if other is not candidate]
        if is_enough(others):
            chosen = others
    return chosen


def prompt_shares(remaining: list[int], budget: int) -> list[int]:
    """Tokens of the budget for each prompt, in whole pages or to its end: least remaining first.

    The prompts come in the order of their requests. A quarter is the first one's before all others, so that it is not
    starved by shorter ones that keep coming.
    """
    needed = [-(-tokens // PAGE_TOKENS) for tokens in remaining]
    left = budget // PAGE_TOKENS
    given = [0] * len(remaining)
    given[0] = min(needed[0], max(1, left // 4))
    left -= given[0]
    for place in sorted(range(len(remaining)), key=remaining.__getitem__):
        more = min(left, needed[place] - given[place])
        given[place] += more
        left -= more
    return [min(pages * PAGE_TOKENS, tokens) for pages, tokens in zip(given, remaining, strict=True)]


def shortest_first(queue: list[T], length: Callable[[T], int], num_overtaken: Callable[[T], int]) -> T:
    """Of those waiting, in their order: the shortest, or the first once so many others have gone before it."""
    first = queue[0]
    return first if num_overtaken(first) >= MAX_OVERTAKEN else min(queue, key=length)
