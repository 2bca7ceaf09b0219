"""E4M3 weights with a scale per 128x128 block, per row, or for the whole tensor.

    weight            float8_e4m3fn [out, in]                  sign, 4 exponent, 3 mantissa bits; largest 448, no inf
    weight_scale_inv  fp32 or bf16 [ceil(out/B), ceil(in/B)]   block scales; despite the name, a MULTIPLIER
    weight_scale      fp32 or bf16 [out, 1] (rows) or [] (tensor)

              0       127 128      255 256   in        W[o, k] = weight[o, k] * scale[o // B, k // B]
            0 ┌──────────┬──────────┬────┐
              │   s00    │   s01    │ s02│             edge blocks may be smaller than B
          128 ├──────────┼──────────┼────┤
          out └──────────┴──────────┴────┘

Rule for all three: scale = absmax / 448 in float32, rounded to the stored dtype, the dtype's epsilon if it is 0 (as
in compressed-tensors); codes = w / scale clamped to ±448 and rounded to nearest even. Codes are never NaN.
"""

from functools import partial

import torch
from torch import Tensor

from onebox.formats.scales import absmax, check_scale_dtype, check_weight, quantize_in_slabs, store_scale
from onebox.spec.errors import MismatchError

__all__ = [
    "dequantize_fp8_block",
    "dequantize_fp8_rows",
    "dequantize_fp8_tensor",
    "quantize_fp8_block",
    "quantize_fp8_rows",
    "quantize_fp8_tensor",
]

E4M3_MAX = 448.0


def quantize_fp8_block(
    weight: Tensor, block: int = 128, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A weight [out, in] to (e4m3 [out, in], scale [ceil(out/block), ceil(in/block)])."""
    check_weight(weight)
    return quantize_in_slabs(weight, partial(_quantize_blocks, block=block, scale_dtype=scale_dtype), multiple=block)


def dequantize_fp8_block(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """float32 [out, in] from e4m3 [out, in] and one scale per block."""
    _check_e4m3(weight)
    rows, columns = weight.shape
    expected = (-(-rows // block), -(-columns // block))
    if scale.shape != expected:
        raise MismatchError(
            f"An FP8 weight {list(weight.shape)} in blocks of {block} has scales {list(expected)}, "
            f"not {list(scale.shape)}."
        )
    blocks = _split_blocks(weight.to(torch.float32), block) * scale.to(torch.float32)[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()


def quantize_fp8_rows(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight [out, in] to (e4m3 [out, in], scale [out, 1])."""
    check_weight(weight)
    return quantize_in_slabs(weight, partial(_quantize_rows, scale_dtype=scale_dtype))


def dequantize_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [out, in] from e4m3 [out, in] and scale [out, 1] or [out]."""
    _check_e4m3(weight)
    if scale.numel() != weight.shape[0]:
        raise MismatchError(f"FP8 rows {list(weight.shape)} need one scale each, not {list(scale.shape)}.")
    return weight.to(torch.float32).mul_(scale.to(torch.float32).reshape(-1, 1))


def quantize_fp8_tensor(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A weight [out, in] to (e4m3 [out, in], one scale [])."""
    check_weight(weight)
    scale = _fp8_scale(absmax(weight, (0, 1)).to(torch.float32), scale_dtype)
    codes, _ = quantize_in_slabs(weight, lambda rows: (_to_e4m3(rows, scale), scale.reshape(1)))
    return codes, scale


def dequantize_fp8_tensor(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [out, in] from e4m3 [out, in] and a scale of one element."""
    _check_e4m3(weight)
    if scale.numel() != 1:
        raise MismatchError(f"A per-tensor FP8 weight has one scale, not {list(scale.shape)}.")
    return weight.to(torch.float32).mul_(scale.to(torch.float32).reshape(()))


def _quantize_blocks(rows: Tensor, block: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = _split_blocks(rows, block)
    scale = _fp8_scale(absmax(blocks, (1, 3)), scale_dtype)
    codes = _to_e4m3(blocks, scale[:, None, :, None])
    return codes.flatten(2).flatten(0, 1)[: rows.shape[0], : rows.shape[1]].contiguous(), scale


def _quantize_rows(rows: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = _fp8_scale(absmax(rows, 1), scale_dtype).unsqueeze(1)
    return _to_e4m3(rows, scale), scale


def _fp8_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    check_scale_dtype(dtype)
    return store_scale(largest / E4M3_MAX, dtype, torch.finfo(dtype).eps)


def _to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """Codes of float32 values; clamped first, because the conversion does not saturate everywhere."""
    return (values / scale.to(torch.float32)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _split_blocks(matrix: Tensor, block: int) -> Tensor:
    """[out, in] to [out blocks, block, in blocks, block], edge blocks padded with zeros."""
    rows, columns = (-size % block for size in matrix.shape)
    padded = torch.nn.functional.pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix
    return padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)


def _check_e4m3(weight: Tensor) -> None:
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
        raise MismatchError(f"An FP8 weight is a float8_e4m3fn matrix, not {weight.dtype} {list(weight.shape)}.")
