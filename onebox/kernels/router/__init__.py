"""The router's choice: which experts a row goes to, and how much each counts."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["route"]


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(logits), made to sum 1: (ids int32 [R, k], weights float32 [R, k]), largest first.

    logits float32 [R, E], k at most 16 and E. Equal logits go to the lower id. The softmax over all E is monotone and
    its denominator cancels when the k are made to sum 1, so logits are ranked and only the chosen are exponentiated:
    the ids are the same on every device.
    """
    result: tuple[Tensor, Tensor] = implementation(__name__, logits).route(logits, k)
    return result
