"""YaRN: a rotary embedding stretched beyond the length that the model was trained on. Stdlib only.

Frequencies that turn many times within the original context are kept, those that turn less than once are divided by
`factor`, and those between are mixed. Cosines and sines are multiplied by `attention_factor`. It is static: short
prompts are computed with the same frequencies as long ones, and differ a little from those of the model without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onebox.spec.errors import UnsupportedError

__all__ = ["MAX_POSITION", "YARN_KEYS", "Yarn", "yarn_from_rope"]

MAX_POSITION = 1 << 24
"""Positions stay below this: an angle is a float32 product, and larger integers are not all float32 numbers."""
YARN_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


@dataclass(frozen=True)
class Yarn:
    """The constants of rope_parameters with rope_type yarn, all resolved."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Multiplies cosines and sines."""
    beta_fast: float = 32.0
    """Frequencies that turn this often within the original context are kept."""
    beta_slow: float = 1.0
    """Frequencies that turn this often or less are divided by `factor`."""
    truncate: bool = True
    """Whether the ends of the mix are whole pairs."""

    @property
    def max_context_tokens(self) -> int:
        return int(self.factor * self.original_max_position_embeddings)

    def mixed_pairs(self, theta: float, rotary_dim: int) -> tuple[float, float]:
        """(first, last): pairs up to `first` keep their frequency, from `last` on it is divided by `factor`."""

        def pair_of(turns: float) -> float:
            wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        return (first, last + 0.001) if first == last else (first, last)


def yarn_from_rope(rope: Mapping[str, Any], where: str) -> Yarn:
    """The constants of a rope_parameters object whose rope_type is yarn; `where` is its path in config.json."""
    factor = _number(rope, "factor", where, least=1.0)
    original = rope.get("original_max_position_embeddings")
    if not isinstance(original, int) or isinstance(original, bool) or original <= 0:
        raise UnsupportedError(
            f"config.json: {where}original_max_position_embeddings is {original!r}; YaRN needs the length that the "
            "model was trained on, 262144 for the published models."
        )
    if factor * original > MAX_POSITION:
        raise UnsupportedError(
            f"config.json: {where}factor {factor:g} stretches {original:,} tokens to {factor * original:,.0f}; onebox "
            f"computes positions below {MAX_POSITION:,}."
        )
    fast, slow = _number(rope, "beta_fast", where, default=32.0), _number(rope, "beta_slow", where, default=1.0)
    if not fast > slow > 0:
        raise UnsupportedError(
            f"config.json: {where}beta_fast {fast:g} must be above beta_slow {slow:g}, and both above 0."
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedError(f"config.json: {where}truncate is {truncate!r}; it must be true or false.")
    return Yarn(factor, original, _attention_factor(rope, factor, where), fast, slow, truncate)


def _attention_factor(rope: Mapping[str, Any], factor: float, where: str) -> float:
    """As given; else 0.1 ln(factor) + 1, or the quotient of two such terms by mscale and mscale_all_dim."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor", where, least=0.0)

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    both = _number(rope, "mscale", where, default=0.0), _number(rope, "mscale_all_dim", where, default=0.0)
    return term(both[0]) / term(both[1]) if all(both) else term(1.0)


def _number(
    rope: Mapping[str, Any], key: str, where: str, *, default: float | None = None, least: float | None = None
) -> float:
    value = rope.get(key)
    if not value and default is not None:
        return default
    lowest = -math.inf if least is None else least
    if isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value < math.inf:
        return float(value)
    bound = f" of at least {least:g}" if least is not None else ""
    raise UnsupportedError(f"config.json: {where}{key} is {value!r}; YaRN needs a number{bound}.")
