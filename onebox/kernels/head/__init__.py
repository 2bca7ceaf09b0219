"""The second half of a language-model head in two planes: logits that the high plane left incomplete.

`int_linear.int6_linear` reads the high plane, three quarters of an INT8 head, and gives logits without the products of
the low plane. `complete_logits` adds those to all logits. `complete_candidates` adds them only where the result can be
among a row's best, and reads no more than that of the low plane: a logit is at most

    incomplete + 1.5 scale sum x + |scale| radius |x|        `onebox.formats.head_planes`

and one that stays below the row's k-th best, k = 1 for greedy sampling, is never sampled, complete or not. A complete
logit has the same bits by either way and in any company.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.head import reference

__all__ = ["complete_candidates", "complete_logits"]

complete_candidates = Operation(reference.complete_candidates, "kernel")
complete_logits = Operation(reference.complete_logits, "kernel")
