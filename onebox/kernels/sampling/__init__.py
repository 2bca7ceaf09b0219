"""From logits to tokens: penalties, a grammar's mask, then greedy or random sampling.

Sampling adds Gumbel noise to logits / temperature and takes the largest of the tokens that top_k, top_p and min_p
leave. The noise is a function of (seed, position, token) alone, so a position's token does not depend on the step or
batch that computes it, and a draft is right exactly if it is that token.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.sampling import reference

__all__ = ["apply_mask", "apply_penalties", "sample"]

sample = Operation(reference.sample, "kernel", cpu="cpu")
apply_penalties = Operation(reference.apply_penalties, "kernel")
apply_mask = Operation(reference.apply_mask, "kernel")
