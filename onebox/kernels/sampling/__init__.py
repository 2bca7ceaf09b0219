"""From logits to tokens: penalties, a grammar's mask, then greedy or random sampling.

Sampling adds Gumbel noise to logits / temperature and takes the largest among the tokens that top_k, top_p and min_p
keep. The noise is a function of (seed, position, token) alone, so the token of a position does not depend on the step
or batch that computes it, and a draft is accepted exactly if it equals that token.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.sampling import reference

__all__ = ["apply_mask", "apply_penalties", "sample", "sample_drafts"]

sample = Operation(reference.sample, "kernel", cpu="cpu")
sample_drafts = Operation(reference.sample_drafts, "kernel", cpu="cpu")
apply_penalties = Operation(reference.apply_penalties, "adjust")
apply_mask = Operation(reference.apply_mask, "adjust")
