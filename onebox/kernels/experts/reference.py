"""The plain twins of the routed experts for a few rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from onebox.formats.expert_tiles import unpack_down, unpack_gate_up

__all__ = ["chosen_experts", "dequantize_expert", "routed_experts", "routed_experts_bf16"]

_ROWS_AT_ONCE = 8


def routed_experts(
    planes: Tensor,
    scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """See `onebox.kernels.experts.routed_experts`."""
    high, low = planes.to(torch.float32).unbind(1)
    x = (high * 256 + low) * scale.repeat_interleave(128, dim=-1)

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        return dequantize_expert(expert, gate_up, gate_up_scale, down, down_scale)

    return chosen_experts(x, ids, weights, matrices, torch.float32)


def routed_experts_bf16(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `onebox.kernels.experts.routed_experts_bf16`."""

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        return gate_up[expert].to(torch.float32), down[expert].to(torch.float32)

    return chosen_experts(x.to(torch.float32), ids, weights, matrices, torch.float32)


def dequantize_expert(
    expert: int, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """One expert's matrices as float32: gate and up rows [2I, H], down [H, I]."""
    one = slice(expert, expert + 1)
    pairs = unpack_gate_up(gate_up[one], gate_up_scale[one]), unpack_down(down[one], down_scale[one])
    whole = [codes * scales.to(torch.float32).repeat_interleave(128, dim=-1) for codes, scales in pairs]
    return whole[0][0], whole[1][0]


def chosen_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: Callable[[int], tuple[Tensor, Tensor]],
    inner_dtype: torch.dtype,
) -> Tensor:
    """The weighted sum of x [R, H] through each row's experts, float32 [R, H], its slots added in their order.

    `matrices` gives an expert's float32 (gate_up, down); SiLU(gate) * up is rounded to `inner_dtype`.
    """
    out = torch.empty((*ids.shape, x.shape[-1]), dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        gate_up, down = matrices(expert)
        row, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = _linear(x[row], gate_up).chunk(2, dim=-1)
        inner = (functional.silu(gate) * up).to(inner_dtype).to(torch.float32)
        out[row, slot] = _linear(inner, down) * weights[row, slot, None]
    total = torch.zeros_like(x)
    for slot_out in out.unbind(1):
        total += slot_out
    return total


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product of x [n, K] and weight [N, K] transposed, always in blocks of the same shape.

    A matrix product's summation order depends on its shape; with one shape a row's bits do not depend on n.
    """
    rows = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -rows % _ROWS_AT_ONCE))
    return torch.cat([block @ weight.T for block in torch.split(padded, _ROWS_AT_ONCE)])[:rows]
