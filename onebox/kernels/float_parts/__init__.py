"""The float linears of a decode step as parts, to be added up by the operation behind."""

from torch import Tensor

from onebox.kernels.dispatch import implementation
from onebox.kernels.float_linear.tiles import FloatWeight
from onebox.kernels.rows import FixedRows

__all__ = ["float_parts"]


def float_parts(rows: FixedRows, weight: FloatWeight) -> Tensor:
    """float32 [P, R, N] whose sum over P, in this order, is the linear with the weight [N, K].

    Reads the rows' x, R <= 64. P is a constant of the weight's shape.
    """
    result: Tensor = implementation(__name__, rows.x).float_parts(rows, weight)
    return result
