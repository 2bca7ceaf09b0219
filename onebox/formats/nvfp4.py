"""NVFP4 weights: 4-bit floats in groups of 16 with an FP8 scale each, and one float32 scale for the tensor.

    packed  uint8 [out, in/2]            byte j:  7 6 5 4 │ 3 2 1 0     high nibble column 2j+1, low nibble column 2j
    scale   float8_e4m3fn [out, in/16]   one per 16 columns
    global  fp32                         one per tensor

    nibble   s e e m     code  0   1    2   3    4   5   6   7    (bit 3 is the sign: 8..15 are the negatives)
                         value 0  0.5   1  1.5   2   3   4   6

Two dialects store the same values:

                     name of packed   name of global          shape  W =                           a scale of 0 becomes
    llm-compressor   weight_packed    weight_global_scale     [1]    value * (scale / global)      1/8
    modelopt         weight           weight_scale_2          []     value * (scale * global)      1

llm-compressor's global is 448*6 / absmax(W), a divisor; modelopt's is absmax(W) / (448*6), a multiplier. A group's
scale is absmax(group) / 6 in units of the global. Values round to the nearest code, a tie to the even code.
"""

from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.formats.bits import pack_bits, unpack_bits
from onebox.formats.scales import absmax, check_weight, quantize_in_slabs
from onebox.spec.errors import MismatchError

__all__ = [
    "NVFP4",
    "Dialect",
    "dequantize_nvfp4",
    "nvfp4_global_scale",
    "pack_e2m1",
    "quantize_nvfp4",
    "round_e2m1",
    "unpack_e2m1",
]

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Dialect(StrEnum):
    """The tool that wrote the file, which determines whether the global scale divides or multiplies."""

    LLM_COMPRESSOR = "llm-compressor"
    MODELOPT = "modelopt"


class NVFP4(NamedTuple):
    """packed uint8 [out, in/2], scale float8_e4m3fn [out, in/16], global_scale float32 [1] or []."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor


def nvfp4_global_scale(weight: Tensor, dialect: Dialect) -> Tensor:
    """The tensor's own global scale; matrices that will be fused should share that of their largest weight."""
    largest = absmax(weight, tuple(range(weight.ndim))).to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    if Dialect(dialect) is Dialect.MODELOPT:
        return (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    divisor = E2M1_MAX * E4M3_MAX / largest
    return torch.where(torch.isinf(divisor), torch.ones_like(divisor), divisor).reshape(1)


def quantize_nvfp4(weight: Tensor, dialect: Dialect, global_scale: Tensor | None = None) -> NVFP4:
    """Quantises a weight [out, in], in a multiple of 16, in float32; `global_scale` replaces the tensor's own."""
    check_weight(weight)
    if weight.shape[1] % GROUP:
        raise MismatchError(f"NVFP4 needs a multiple of {GROUP} input columns, not {weight.shape[1]}.")
    shared = nvfp4_global_scale(weight, dialect) if global_scale is None else global_scale
    _check_global_scale(shared)
    packed, scale = quantize_in_slabs(weight, partial(_quantize_rows, shared=shared, dialect=dialect))
    return NVFP4(packed, scale, shared)


def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, dialect: Dialect) -> Tensor:
    """float32 [out, in] from the three stored tensors."""
    rows, columns = packed.shape[0], packed.shape[-1] * 2
    if packed.ndim != 2 or scale.dtype != torch.float8_e4m3fn or scale.shape != (rows, columns // GROUP):
        raise MismatchError(
            f"NVFP4 codes {list(packed.shape)} need float8_e4m3fn scales [{rows}, {columns // GROUP}], "
            f"not {scale.dtype} {list(scale.shape)}."
        )
    _check_global_scale(global_scale)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    values = table[unpack_e2m1(packed).to(torch.int32)].reshape(rows, -1, GROUP)
    return (values * _step(scale, global_scale, dialect).unsqueeze(-1)).flatten(1)


def round_e2m1(values: Tensor) -> Tensor:
    """Codes, uint8, of float32 values; beyond ±6 saturates, -0.0 has code 0, a negative rounded to zero code 8."""
    size = values.abs().clamp_(max=E2M1_MAX)
    # Codes are 1/2 apart up to 2, 1 apart up to 4, 2 apart up to 6. Rounded on each of these grids, ties to even,
    # the smallest of the three codes is that of the right grid.
    code = (size * 2).round_()
    code = torch.minimum(code, size.round().add_(2))
    code = torch.minimum(code, size.div_(2).round_().add_(4))
    return code.to(torch.uint8) | (values < 0).to(torch.uint8).mul_(8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes uint8 [..., n] to bytes uint8 [..., n/2], even columns in the low nibble."""
    return pack_bits(codes, 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., n/2] to codes uint8 [..., n]."""
    return unpack_bits(packed, 4)


def _quantize_rows(rows: Tensor, shared: Tensor, dialect: Dialect) -> tuple[Tensor, Tensor]:
    groups = rows.reshape(len(rows), -1, GROUP)
    scale = _group_scale(absmax(groups, -1), shared, dialect)
    values = groups / _step(scale, shared, dialect).unsqueeze(-1)
    return pack_e2m1(round_e2m1(values).flatten(1)), scale


def _group_scale(largest: Tensor, global_scale: Tensor, dialect: Dialect) -> Tensor:
    """FP8 scales [out, groups], never zero."""
    if Dialect(dialect) is Dialect.MODELOPT:
        # A group whose scale underflows FP8 gets the smallest FP8 scale; only a group of zeros gets 1.
        wanted = (largest / (E2M1_MAX * global_scale)).clamp(E4M3_SMALLEST, E4M3_MAX)
        return torch.where(largest == 0, torch.ones_like(wanted), wanted).to(torch.float8_e4m3fn)
    stored = (global_scale * (largest / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(stored == 0, torch.full_like(stored, 0.125), stored).to(torch.float8_e4m3fn)


def _step(scale: Tensor, global_scale: Tensor, dialect: Dialect) -> Tensor:
    """The weight of one unit of a code's value, float32 [out, groups]."""
    wide = scale.to(torch.float32)
    return wide * global_scale if Dialect(dialect) is Dialect.MODELOPT else wide / global_scale


def _check_global_scale(global_scale: Tensor) -> None:
    if global_scale.numel() != 1:
        raise MismatchError(f"An NVFP4 weight has one global scale, not {list(global_scale.shape)}.")
