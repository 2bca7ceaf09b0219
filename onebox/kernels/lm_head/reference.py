"""The plain twins of the language-model head."""

from torch import Tensor

from onebox.kernels.int_linear.reference import int8_linear

__all__ = ["greedy_head", "logits_head", "top_k_head"]


def logits_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """See `onebox.kernels.lm_head.logits_head`."""
    return int8_linear(planes, scale, weight, weight_scale)


def greedy_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.lm_head.greedy_head`."""
    ids, logits = top_k_head(planes, scale, weight, weight_scale, 1)
    return ids[:, 0], logits[:, 0]


def top_k_head(planes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `onebox.kernels.lm_head.top_k_head`."""
    # A stable sort keeps equal logits in the order of their ids, which topk does not promise.
    logits, ids = logits_head(planes, scale, weight, weight_scale).sort(dim=-1, descending=True, stable=True)
    return ids[:, :k].contiguous(), logits[:, :k].contiguous()
