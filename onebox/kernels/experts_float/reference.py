"""The plain twins of the float experts: each expert's weights in float32, then `experts.chosen_experts`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onebox.formats import Dialect, dequantize_fp8_block, dequantize_fp8_rows, dequantize_nvfp4
from onebox.kernels.experts.reference import chosen_experts

__all__ = ["prefill_experts_fp8", "prefill_experts_nvfp4", "routed_experts_fp8", "routed_experts_nvfp4"]

Matrices = Callable[[int], tuple[Tensor, Tensor]]


def routed_experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """See `onebox.kernels.experts_float.routed_experts_fp8`."""
    matrices = _fp8_matrices(gate_up, gate_up_scale, down, down_scale)
    return chosen_experts(x.to(torch.float32), ids, weights, matrices, torch.float32)


def routed_experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
) -> Tensor:
    """See `onebox.kernels.experts_float.routed_experts_nvfp4`."""
    matrices = _nvfp4_matrices(gate_up, gate_up_scale, down, down_scale, multipliers)
    return chosen_experts(x.to(torch.float32), ids, weights, matrices, torch.float32)


def prefill_experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """See `onebox.kernels.experts_float.prefill_experts_fp8`."""
    matrices = _fp8_matrices(gate_up, gate_up_scale, down, down_scale)
    return chosen_experts(x.to(torch.float32), ids, weights, matrices, x.dtype).to(x.dtype)


def prefill_experts_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    multipliers: Tensor,
) -> Tensor:
    """See `onebox.kernels.experts_float.prefill_experts_nvfp4`."""
    matrices = _nvfp4_matrices(gate_up, gate_up_scale, down, down_scale, multipliers)
    return chosen_experts(x.to(torch.float32), ids, weights, matrices, x.dtype).to(x.dtype)


def _fp8_matrices(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> Matrices:
    dequantize = dequantize_fp8_block if gate_up_scale.ndim == 3 else dequantize_fp8_rows

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        gate, up = map(dequantize, gate_up[expert].chunk(2), gate_up_scale[expert].chunk(2))
        return torch.cat([gate, up]), dequantize(down[expert], down_scale[expert])

    return matrices


def _nvfp4_matrices(
    gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, multipliers: Tensor
) -> Matrices:
    dequantize = partial(dequantize_nvfp4, dialect=Dialect.MODELOPT)

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        parts = (*gate_up[expert].chunk(2), down[expert])
        scales = (*gate_up_scale[expert].chunk(2), down_scale[expert])
        gate, up, whole_down = map(dequantize, parts, scales, multipliers[expert])
        return torch.cat([gate, up]), whole_down

    return matrices
