"""Common steps of all weight quantisers: the largest magnitude, the scale as stored, quantisation in slabs.

    absmax ──/ divisor──▶ float32 ──round to the stored dtype──▶ 0 ? replacement ──▶ stored scale ──▶ codes = w / scale

Codes are always computed from the scale as stored, so that dequantising adds no second rounding.

    rows of a weight  ──▶ slab 0 ─ float32 ─ codes ┐
                      ──▶ slab 1 ─ float32 ─ codes ┴─▶ all codes         a slab's float32 copy stays in the cache
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onebox.spec.errors import MismatchError, UnsupportedError

__all__ = ["absmax", "check_scale_dtype", "check_weight", "quantize_in_slabs", "store_scale"]

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SLAB_ELEMENTS = 1 << 20


def check_weight(weight: Tensor) -> None:
    """Rejects anything but a floating-point matrix [out, in] with at least one element."""
    if weight.ndim != 2 or weight.numel() == 0 or not weight.is_floating_point() or weight.element_size() == 1:
        raise MismatchError(
            f"A weight to quantise must be a non-empty float16, bfloat16 or float32 matrix [out, in], "
            f"not {weight.dtype} of shape {list(weight.shape)}."
        )


def absmax(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest magnitude over `dim`; infinite and NaN weights are rejected."""
    largest = torch.maximum(values.amax(dim), -values.amin(dim))  # two reductions, no copy of |values|
    if not bool(torch.isfinite(largest).all()):
        raise UnsupportedError("The weight holds infinite or NaN values, which cannot be quantised; check its source.")
    return largest


def quantize_in_slabs(
    weight: Tensor, quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]], multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a weight whose rows are independent in groups of `multiple`, about SLAB_ELEMENTS at a time.

    `quantize_rows` gets float32 rows [n, in]. The slab size does not affect the result, but the time by a factor of 5.
    """
    rows = max(1, SLAB_ELEMENTS // weight.shape[1] // multiple) * multiple
    starts = range(0, weight.shape[0], rows)
    parts = [quantize_rows(weight[start : start + rows].to(torch.float32)) for start in starts]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def check_scale_dtype(dtype: torch.dtype) -> None:
    if dtype not in SCALE_DTYPES:
        raise UnsupportedError(f"Scales can be stored as float16, bfloat16 or float32, not as {dtype}.")


def store_scale(scale: Tensor, dtype: torch.dtype, when_zero: float) -> Tensor:
    """Rounds float32 scales to `dtype`; 0 is replaced by `when_zero`, overflow to infinity is rejected."""
    stored = scale.to(dtype)
    if bool(torch.isinf(stored).any()):
        raise UnsupportedError(f"A scale of {float(scale.max()):.3g} does not fit {dtype}; store wider scales.")
    return torch.where(stored == 0, torch.tensor(when_zero, dtype=dtype, device=stored.device), stored)
