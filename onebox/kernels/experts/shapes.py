"""Limits of the float experts and checks of their arguments."""

import torch
from torch import Tensor

from onebox.kernels.common.float_weight import SCALE_BLOCK
from onebox.kernels.common.rows import FixedRows
from onebox.spec.errors import MismatchError

__all__ = [
    "MOST_PAIRS",
    "check_fp8",
    "check_fused_fp8",
    "check_fused_nvfp4",
    "check_nvfp4",
    "check_prefill",
    "check_routed",
]

MOST_PAIRS = 1024  # rows times slots in `routed_...`; use `prefill_...` for more
GROUP = 16  # columns that share an NVFP4 scale


def check_routed(x: Tensor, ids: Tensor) -> None:
    if ids.numel() > MOST_PAIRS:
        raise MismatchError(f"Routed experts take at most {MOST_PAIRS} row-slots, not {ids.numel()}; use the prefill.")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise MismatchError(f"Activations are bfloat16 or float32, not {x.dtype}.")


def check_prefill(x: Tensor) -> None:
    if x.dtype is not torch.bfloat16:
        raise MismatchError(f"The experts' prefill takes bfloat16 activations, not {x.dtype}.")


def check_fp8(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    """Both scales are per block (three dimensions), or both are per row (two)."""
    experts, hidden, inner = down.shape
    _check("gate_up", gate_up, (experts, 2 * inner, hidden), torch.float8_e4m3fn)
    _check("down", down, (experts, hidden, inner), torch.float8_e4m3fn)
    dtype = torch.bfloat16 if gate_up_scale.dtype is torch.bfloat16 else torch.float32
    if gate_up_scale.ndim == 3:
        blocks, inner_blocks = _scale_blocks(hidden), _scale_blocks(inner)
        _check("gate_up_scale", gate_up_scale, (experts, 2 * inner_blocks, blocks), dtype)
        _check("down_scale", down_scale, (experts, blocks, inner_blocks), dtype)
    else:
        _check("gate_up_scale", gate_up_scale, (experts, 2 * inner), dtype)
        _check("down_scale", down_scale, (experts, hidden), dtype)
    _check_rows(x, hidden)


def check_nvfp4(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, multipliers: Tensor
) -> None:
    experts, hidden, half = down.shape
    inner = 2 * half
    _check("gate_up", gate_up, (experts, 2 * inner, hidden // 2), torch.uint8)
    _check("gate_up_scale", gate_up_scale, (experts, 2 * inner, hidden // GROUP), torch.float8_e4m3fn)
    _check("down", down, (experts, hidden, half), torch.uint8)
    _check("down_scale", down_scale, (experts, hidden, inner // GROUP), torch.float8_e4m3fn)
    _check("multipliers", multipliers, (experts, 3), torch.float32)
    _check_rows(x, hidden)


def check_fused_fp8(rows: FixedRows, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    _check_whole_blocks(down.shape[1], down.shape[2])
    check_fp8(rows.x, gate_up, gate_up_scale, down, down_scale)


def check_fused_nvfp4(
    rows: FixedRows, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, multipliers: Tensor
) -> None:
    _check_whole_blocks(down.shape[1], 2 * down.shape[2])
    check_nvfp4(rows.x, gate_up, gate_up_scale, down, down_scale, multipliers)


def _check_whole_blocks(hidden: int, inner: int) -> None:
    if hidden % SCALE_BLOCK or inner % SCALE_BLOCK:
        raise MismatchError(
            f"Fused float experts need sizes that are multiples of {SCALE_BLOCK}, not {hidden} x {inner}; "
            "use the operation without `_fused`."
        )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise MismatchError(
            f"The experts' {name} must be contiguous {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}."
        )


def _check_rows(x: Tensor, hidden: int) -> None:
    if x.ndim != 2 or x.shape[1] != hidden or not x.is_contiguous():
        raise MismatchError(f"Rows {list(x.shape)} do not fit experts of {hidden} input columns.")


def _scale_blocks(size: int) -> int:
    """Number of block scales along `size` rows or columns of an FP8 weight."""
    return -(-size // SCALE_BLOCK)
