"""The twins of the router."""

import torch
from torch import Tensor

from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.invariant import add_in_order, sigmoid
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.float_linear.reference import float_parts

__all__ = ["route", "route_fused"]


def route(logits: Tensor, k: int, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(logits), normalised to sum 1: (ids int32 [R, k], weights float32 [R, k]), largest first.

    logits float32 [R, E], k at most 16 and E. Ties go to the lower id. Rows from num_rows (int32 [1]) on belong to no
    sequence: their ids are -1, so that no expert is read for them.
    """
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    chosen = ids[:, :k].to(torch.int32)
    if num_rows is not None:
        is_blank = torch.arange(len(logits), device=logits.device) >= num_rows
        chosen = chosen.masked_fill(is_blank[:, None], -1)
    return chosen, ranked[:, :k].softmax(dim=-1)


def route_fused(
    router_parts: Tensor, k: int, rows: FixedRows, gate_up: FloatWeight | None = None, num_rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(ids int32 [R, k], weights float32 [R, k], share float32 [R], parts of the shared expert's gate_up or None).

    router_parts float32 [parts, R, E + 1], added in order: logits of the E experts and, last, of the shared expert's
    gate. ids and weights are those of `route`, num_rows as there; share = sigmoid(the last logit). The parts of gate_up
    [2I, H], float32 [parts, R, 2I], are `float_parts` of the rows [R, H].
    """
    logits = add_in_order(router_parts)
    ids, weights = route(logits[:, :-1], k, num_rows)
    return ids, weights, sigmoid(logits[:, -1]), None if gate_up is None else float_parts(rows, gate_up)
