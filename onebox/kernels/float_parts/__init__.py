"""The float linears of a decode step, one or two of them over the same rows in one launch, as parts to be added up."""

from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.rows import FixedRows

__all__ = ["float_parts"]


def float_parts(rows: FixedRows, weights: tuple[FloatWeight, ...]) -> tuple[Tensor, ...]:
    """Of each of one or two weights [N, K], float32 [P, R, N] whose sum over P, in this order, is the linear.

    Reads the rows' x, R <= 64. P is a constant of the weight's shape and the dtype of x.
    """
    result: tuple[Tensor, ...] = implementation(__name__, rows.x).float_parts(rows, weights)
    return result
