"""The draw of one token, written down a second time in numpy, as an oracle for the twin and the kernel."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# SplitMix64: a counter stepped by _GOLDEN, scrambled by _mix. Needs no state between draws, only a place to start.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample(logits, seed, position, temperature=1.0, top_k=0, top_p=1.0):
    """The token drawn from logits [V] for `position`."""
    if temperature == 0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / temperature
    kept = _kept(scores, top_k, top_p)
    return int(kept[(scores[kept] + gumbel(seed, position, kept)).argmax()])


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
