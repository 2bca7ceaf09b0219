"""From logits to tokens: penalties, the grammar's mask, and the draw itself.

The noise of a draw is a function of (seed, position, token) alone, so a position's token is the same in whatever step
or batch it is computed, and a draft is right exactly if it is that token. V is the size of the vocabulary here.
"""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["apply_mask", "apply_penalties", "sample"]


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """The token of each row, int64 [R]: argmax of logits / temperature + Gumbel noise over the tokens that are kept.

    logits [R, V] float32, V below 2^19; a row with a NaN, with +inf or with nothing but -inf is none and gives -1.
    temperature, top_p and min_p [R] are floats (float64 to mean the same number as on the host), top_k [R] integers,
    seeds and positions [R] int64. Temperature 0 is greedy: no noise, no limits. In order of falling logit, then rising
    id, the tokens kept are the first top_k (0: all), of those the fewest whose probability reaches top_p (1: all), of
    those the ones at least min_p times as likely as the likeliest (0: all). Equal values go to the lowest id.
    """
    chosen = implementation(__name__, logits)
    token_ids: Tensor = chosen.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    return token_ids


def apply_penalties(
    logits: Tensor, token_ids: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """Makes tokens that occurred less likely, in place in logits [R, V] float32.

    token_ids [R, N]: the distinct tokens of each row's prompt and answer, -1 where a row has fewer than N; counts
    [R, N]: how often each stands in the answer, 0 for the prompt's own. Floats [R]: positive logits are divided and
    others multiplied by repetition (1: off), then frequency times the count is subtracted, then presence where the
    count is not 0.
    """
    implementation(__name__, logits).apply_penalties(logits, token_ids, counts, presence, frequency, repetition)


def apply_mask(logits: Tensor, bitmask: Tensor) -> None:
    """Refuses tokens, in place in logits [R, V] float32.

    bitmask [R, ceil(V / 32)] int32: where bit i of word w is 0, logit 32 w + i becomes -inf.
    """
    implementation(__name__, logits).apply_mask(logits, bitmask)
