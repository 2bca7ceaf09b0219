"""Two choices of the scheduler, as functions of plain values: who shares a step's prompt tokens, whom to preempt."""

from collections.abc import Callable
from typing import TypeVar

from onebox.spec.kv import PAGE_TOKENS

__all__ = ["fewest", "prompt_shares"]

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


def prompt_shares(remaining: list[int], budget: int, turn: int) -> list[int]:
    """Tokens of the budget for each prompt, in whole pages or to its end: round robin, so that no prompt is starved.

    The first turn rotates with every step, for the case that there are more prompts than pages in the budget.
    """
    needed = [-(-tokens // PAGE_TOKENS) for tokens in remaining]
    given = [0] * len(remaining)
    left = budget // PAGE_TOKENS
    while left and given != needed:
        for place in ((turn + i) % len(remaining) for i in range(len(remaining))):
            if left and given[place] < needed[place]:
                given[place] += 1
                left -= 1
    return [min(pages * PAGE_TOKENS, tokens) for pages, tokens in zip(given, remaining, strict=True)]
