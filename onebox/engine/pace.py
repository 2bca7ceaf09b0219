"""How many prompt tokens a step computes while answers run: as many as they may wait for, and enough to be worth it.

A step with prompts takes `fixed + each x tokens` seconds: it reads the weights once, whatever its tokens. Both are
fitted to recent steps. Where the fixed part alone is more than answers may wait, as on a machine with slow memory, a
step takes as many tokens as cost the same again: half of its time is then the tokens' own.
"""

from onebox.spec.kv import PAGE_TOKENS

__all__ = ["PromptPace"]

_MEMORY = 0.9
"""Factor on the weight of older steps per new one: a memory of about ten steps, for contexts grow."""
_LEAST_SPREAD = 0.02
"""Of the mean square of the steps' tokens: with less, they are too alike to tell the fixed part from the tokens'."""


class PromptPace:
    """The budget of prompt tokens of each step, a multiple of PAGE_TOKENS up to `max_tokens`."""

    def __init__(self, max_tokens: int, max_wait_s: float | None) -> None:
        """Without `max_wait_s`, which is how long answers may wait for a step, the budget is always `max_tokens`."""
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s
        # Decayed sums over steps of 1, tokens, seconds, tokens squared, tokens x seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a step with so many prompt tokens."""
        step = (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        self._sums = tuple(_MEMORY * old + new for old, new in zip(self._sums, step, strict=True))  # type: ignore[assignment]

    def budget(self, *, has_answers: bool) -> int:
        if not has_answers or self._max_wait_s is None or not self._sums[0]:
            return self._max_tokens
        fixed, each = self._costs()
        if each <= 0:
            return self._max_tokens
        num_tokens = max(self._max_wait_s - fixed, fixed) / each
        num_pages = max(1, round(min(num_tokens, self._max_tokens) / PAGE_TOKENS))
        return min(num_pages * PAGE_TOKENS, self._max_tokens)

    def _costs(self) -> tuple[float, float]:
        """(seconds of a step without tokens, seconds of each token), neither negative."""
        weight, tokens, seconds, squares, products = self._sums
        spread = squares / weight - (tokens / weight) ** 2
        if spread < _LEAST_SPREAD * squares / weight:
            # A quarter of such a step is taken for fixed: the next budget differs, and then both are known.
            return seconds / weight / 4, 3 * seconds / tokens / 4
        each = (products / weight - tokens * seconds / weight**2) / spread
        fixed = (seconds - each * tokens) / weight
        if each <= 0:
            return seconds / weight, 0.0
        return (fixed, each) if fixed >= 0 else (0.0, products / squares)
