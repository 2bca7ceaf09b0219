"""RMSNorm, zero-centred, with the residual added in the same pass."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["add_rms_norm"]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * (1 + weight), x + residual).

    x [R, H]: what the last layer added, any float dtype; residual [R, H] float32; weight [H]. The sum is float32 and is
    what the next call takes as residual; the normed rows have the dtype of x.
    """
    chosen = implementation(__name__, x)
    result: tuple[Tensor, Tensor] = chosen.add_rms_norm(x, residual, weight, eps)
    return result
