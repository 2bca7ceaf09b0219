"""From logits to tokens: penalties, the grammar's mask, and the draw itself.

The noise of a draw is a function of (seed, position, token) alone, so a position's token is the same in whatever step
or batch it is computed, and a draft is right exactly if it is that token.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.sampling import reference

__all__ = ["apply_mask", "apply_penalties", "sample"]

sample = Operation(reference.sample, "kernel", cpu="cpu")
apply_penalties = Operation(reference.apply_penalties, "kernel")
apply_mask = Operation(reference.apply_mask, "kernel")
