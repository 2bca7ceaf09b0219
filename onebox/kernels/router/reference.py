"""The twins of the router."""

import torch
from torch import Tensor

from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.invariant import add_in_order, product, sigmoid
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.float_linear.reference import float_parts
from onebox.kernels.norm.reference import add_rms_norm_fused

__all__ = ["add_rms_norm_router", "route", "route_fused"]


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
    router_parts: Tensor,
    k: int,
    rows: FixedRows,
    gate_up: FloatWeight | None = None,
    num_rows: Tensor | None = None,
    is_divided: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(ids int32 [R, k], weights float32 [R, k], share float32 [R], parts of the shared expert's gate_up or None).

    router_parts float32 [parts, R, E + 1], added in order: logits of the E experts and, last, of the shared expert's
    gate. ids and weights are those of `route`, num_rows as there; share = sigmoid(the last logit). The parts of gate_up
    [2I, H], float32 [parts, R, 2I], are `float_parts` of the rows [R, H]. Unless `is_divided`, the norm division of the
    rows is still pending in router_parts.
    """
    logits = add_in_order(router_parts)
    if not is_divided:
        logits = rows.scaled(logits)
    ids, weights = route(logits[:, :-1], k, num_rows)
    return ids, weights, sigmoid(logits[:, -1]), None if gate_up is None else float_parts(rows, gate_up)


def add_rms_norm_router(
    residual: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, router: Tensor
) -> tuple[FixedRows, Tensor, Tensor]:
    """`add_rms_norm_fused` (rows, total) and the router's product of the rows' x as parts float32 [slices, R, N].

    router bfloat16 [N, H], H a multiple of 128. A part is a slice of the columns (`groups_of_slice`); the rows' norm
    division is still pending in it.
    """
    rows, total = add_rms_norm_fused(residual, parts, weight, eps, dtype)
    size = 128 * groups_of_slice(rows.x.shape[1])
    cuts = zip(rows.x.to(torch.float32).split(size, dim=1), router.split(size, dim=1), strict=True)
    return rows, total, torch.stack([product(some, own.to(torch.float32)) for some, own in cuts])


def groups_of_slice(hidden: int) -> int:
    """Groups (128 columns) of a slice: two, if there is an even number of them."""
    return 2 if hidden % 256 == 0 else 1
