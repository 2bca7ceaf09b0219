"""The plain twins of the routed experts for many tokens."""

import torch
from torch import Tensor

from onebox.kernels.experts.reference import chosen_experts, dequantize_expert

__all__ = ["prefill_experts", "prefill_experts_bf16"]

_TILE = 32


def prefill_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """See `onebox.kernels.experts_prefill.prefill_experts`."""

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        return dequantize_expert(expert, gate_up, gate_up_scale, down, down_scale)

    return chosen_experts(x.to(torch.float32), ids, weights, matrices, x.dtype, _TILE).to(x.dtype)


def prefill_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `onebox.kernels.experts_prefill.prefill_experts_bf16`."""

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        return gate_up[expert].to(torch.float32), down[expert].to(torch.float32)

    return chosen_experts(x.to(torch.float32), ids, weights, matrices, x.dtype, _TILE).to(x.dtype)
