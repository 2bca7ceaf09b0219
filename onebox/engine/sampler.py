"""Chooses one token from logits. The noise is a function of (seed, position, token) alone, as design law 1 asks.

The drawn token is the argmax of logits / temperature + Gumbel noise over the tokens that top_k and top_p leave, which
is an exact draw from their softmax. Whoever computes that position, in whatever step or batch, draws the same token.
"""

import numpy as np
from numpy.typing import NDArray

from onebox.engine.request import SamplingParams

__all__ = ["gumbel", "sample"]

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# SplitMix64: a counter stepped by _GOLDEN, scrambled by _mix. Needs no state between draws, only a place to start.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample(logits: NDArray[np.float32], sampling: SamplingParams, position: int) -> int:
    """The token drawn from logits [V] for `position`; `sampling.seed` is set unless temperature is 0."""
    if not np.isfinite(logits).all():
        raise FloatingPointError("its logits are not finite numbers")
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.seed is None:
        raise ValueError("a random draw needs a seed")
    scores = logits.astype(np.float64) / sampling.temperature
    kept = _kept(scores, sampling.top_k, sampling.top_p)
    return int(kept[(scores[kept] + gumbel(sampling.seed, position, kept)).argmax()])


def _kept(scores: Floats, top_k: int, top_p: float) -> Ids:
    """The likeliest top_k tokens, and of those the fewest whose softmax reaches top_p; likeliest first."""
    order: Ids = np.argsort(-scores, kind="stable")[: top_k or None]
    shares = np.exp(scores[order] - scores[order[0]])
    before = np.cumsum(shares) - shares
    # The first token has nothing before it, so one always stays.
    is_kept: NDArray[np.bool_] = before < top_p * shares.sum()
    return order[is_kept]


def gumbel(seed: int, position: int, token_ids: Ids) -> Floats:
    """Standard Gumbel noise of each token [n] at this position."""
    # Seeds and positions are scrambled one after the other, so neighbouring ones share no stretch of the sequence.
    start = _mix(_mix(_word(seed)) ^ _word(position))
    bits = _mix(start + (token_ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _word(value: int) -> NDArray[np.uint64]:
    # An array of one: numpy lets arrays wrap around silently, which is the arithmetic meant here.
    return np.array([value & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
