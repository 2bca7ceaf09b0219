"""An integer-quantised matrix, unpacked: the common form of all integer file formats.

    W[o, k] = (codes[o, k] - zeros[o, g]) * scales[o, g]        g = k // group_size, or group_index[k]

    codes   int8 [out, in]       o ┌ group 0 ┬ group 1 ┬ ... ┬ last ┐     signed: 3 bit -4..3, 4 bit -8..7, ...
    scales  any  [out, groups]     │   s00   │   s01   │     │ short│     the stored dtype, never cast
    zeros   int8 [out, groups]     └─────────┴─────────┴─────┴──────┘     None: symmetric, every zero is 0

Each code takes one byte: this form is for conversion and checks, not for storing 122B parameters.
A stack of experts [E, out, in] is the matrix [E*out, in].
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onebox.formats.scales import SCALE_DTYPES, absmax, check_scale_dtype, check_weight, quantize_in_slabs, store_scale
from onebox.spec.errors import MismatchError, UnsupportedError

__all__ = ["GroupInt", "dequantize", "quantize"]


@dataclass(frozen=True, eq=False)
class GroupInt:
    """Integer codes with one scale (and zero) per row and group; shapes and dtypes are checked on construction.

    `group_size` counts columns; the last group may be shorter. With `group_index` (int32 [in], the group of each
    column) the columns of a group need not be contiguous, and `group_size` is informational.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_index: Tensor | None
    group_size: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise UnsupportedError(f"Integer weights have 2, 3, 4 or 8 bits here, not {self.bits}.")
        if self.codes.dtype != torch.int8 or self.codes.ndim != 2 or self.group_size < 1:
            raise MismatchError(f"Codes must be an int8 matrix, not {self.codes.dtype} {list(self.codes.shape)}.")
        rows, columns = self.codes.shape
        groups = self.scales.shape[-1] if self.group_index is not None else -(-columns // self.group_size)
        if self.scales.dtype not in SCALE_DTYPES or self.scales.shape != (rows, groups):
            raise MismatchError(
                f"Codes {list(self.codes.shape)} in groups of {self.group_size} need float scales [{rows}, {groups}], "
                f"not {self.scales.dtype} {list(self.scales.shape)}."
            )
        if self.zeros is not None and (self.zeros.dtype != torch.int8 or self.zeros.shape != self.scales.shape):
            raise MismatchError(
                f"Zeros must be int8 and shaped like the scales {list(self.scales.shape)}, "
                f"not {self.zeros.dtype} {list(self.zeros.shape)}."
            )
        _check_group_index(self.group_index, columns, groups)


def dequantize(matrix: GroupInt) -> Tensor:
    """The weights, float32 [out, in]: exact for float16 and bfloat16 scales, rounded once for float32 scales."""
    weight = matrix.codes.to(torch.float32)
    if matrix.zeros is not None:
        weight -= _per_column(matrix, matrix.zeros)
    return weight.mul_(_per_column(matrix, matrix.scales))


def quantize(
    weight: Tensor, bits: int, group_size: int | None = None, scale_dtype: torch.dtype = torch.bfloat16
) -> GroupInt:
    """Round a weight [out, in] to nearest (ties to even), symmetric; one group per row if `group_size` is None or -1.

    4 bit: scale = absmax / 7.5, codes -8..7, a zero scale becomes the dtype's epsilon: compressed-tensors' rule; so at
    3 bits scale = absmax / 3.5 and codes -4..3, at 2 bits absmax / 1.5 and -2..1.
    8 bit: scale = max(absmax / 127, 1e-12), codes -127..127: the rule of the per-row INT8 language-model heads.
    Scales are computed in float32 and rounded to `scale_dtype`; codes are computed from the rounded scales, in float32.
    """
    check_weight(weight)
    check_scale_dtype(scale_dtype)
    size = weight.shape[1] if group_size in (None, -1) else group_size
    if size is None or size < 1:
        raise MismatchError(f"A group has at least one column, or is -1 for a whole row; {group_size} is neither.")
    codes, scales = quantize_in_slabs(weight, partial(_quantize_rows, bits=bits, size=size, scale_dtype=scale_dtype))
    return GroupInt(codes=codes, scales=scales, zeros=None, group_index=None, group_size=size, bits=bits)


def _quantize_rows(rows: Tensor, bits: int, size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [n, in] and scales [n, groups] of float32 rows."""
    groups = _split_groups(rows, size)
    largest = absmax(groups, -1)
    if bits in (2, 3, 4):
        middle = 1 << (bits - 1)
        scales = store_scale(largest / (middle - 0.5), scale_dtype, torch.finfo(scale_dtype).eps)
        low, high = -middle, middle - 1
    elif bits == 8:
        scales, low, high = _int8_scale(largest, scale_dtype), -127, 127
    else:
        raise UnsupportedError(f"Integer weights have 2, 3, 4 or 8 bits here, not {bits}.")
    levels = (groups / scales.unsqueeze(-1).to(torch.float32)).clamp_(low, high).round_()
    return levels.to(torch.int8).reshape(len(rows), -1)[:, : rows.shape[1]].contiguous(), scales


def _int8_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    smallest_positive = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # float16 cannot hold 1e-12
    return store_scale((largest / 127).clamp_(min=1e-12), dtype, smallest_positive)


def _split_groups(weight: Tensor, size: int) -> Tensor:
    """[out, in] to [out, groups, size], a short last group padded with zeros."""
    padding = -weight.shape[1] % size
    padded = torch.nn.functional.pad(weight, (0, padding)) if padding else weight
    return padded.reshape(weight.shape[0], -1, size)


def _per_column(matrix: GroupInt, values: Tensor) -> Tensor:
    """[out, groups] to float32 [out, in], each column with its group's value."""
    wide = values.to(torch.float32)
    if matrix.group_index is not None:
        return wide.index_select(1, matrix.group_index)
    repeated = wide.unsqueeze(-1).expand(-1, -1, matrix.group_size)
    return repeated.reshape(len(wide), -1)[:, : matrix.codes.shape[1]]


def _check_group_index(index: Tensor | None, columns: int, groups: int) -> None:
    if index is None:
        return
    if index.dtype != torch.int32 or index.shape != (columns,):
        raise MismatchError(f"A group index must be int32 [{columns}], not {index.dtype} {list(index.shape)}.")
    if columns and (int(index.min()) < 0 or int(index.max()) >= groups):
        raise MismatchError(f"The group index contains groups outside 0..{groups - 1}.")
