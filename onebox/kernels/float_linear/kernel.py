"""The float linears in Triton: one tiled kernel for all formats, and one that adds the parts (partial sums over K).

Every stored weight is, up to a factor that is applied in float32, exactly a bfloat16 number: an E4M3 code has 4
significant bits, and an E2M1 code times its E4M3 scale has 2 + 4. So all formats run on bfloat16 tensor cores with
exact products and float32 sums. A float32 activation is split into three bfloat16 terms (24 = 3 * 8 bits), which keeps
float32 precision on the tensor cores. Block, row and tensor scales multiply sums.

The weight is the left operand: its tile is loaded once and decoded in registers, and the rows of x, padded to 8, are
the narrow side. The order along K is a constant of the weight's shape and the variant, for any number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import dot_split
from onebox.kernels.common.float_codes import E2M1_IN_MULTIPLIER, decode_e4m3, load_nvfp4
from onebox.kernels.common.float_weight import SCALE_BLOCK, FloatWeight
from onebox.kernels.common.launch import ceil_div
from onebox.kernels.common.target import has_large_shared_memory
from onebox.kernels.float_linear.tiles import Tile, decode_tile

__all__ = [
    "bf16_linear",
    "bf16_matmul",
    "fp8_block_linear",
    "fp8_block_matmul",
    "fp8_row_block_linear",
    "fp8_row_linear",
    "fp8_row_matmul",
    "linear_tile",
    "nvfp4_linear",
    "nvfp4_matmul",
    "store_tile",
]

BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def linear_tile(
    r,  # the tile's rows
    block,  # index of the block of BLOCK_N columns
    part,
    x_ptr,  # bfloat16 or float32 [R, K], row stride x_stride
    weight_ptr,  # e4m3: uint8 [N, K]; nvfp4: uint8 [N, K/2]; bf16: bfloat16 [N, K]
    scale_ptr,  # block: [ceil(N/128), ceil(K/128)]; row_block: [N, ceil(K/128)]; row: [N] or, with scale_stride 0, [1];
    # nvfp4: uint8 [N, K/16]
    multiplier_ptr,  # nvfp4: float32 [1]
    R,
    N,
    x_stride,
    scale_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # "block", "row_block", "row", "nvfp4" or "bf16"
    BLOCK_N: tl.constexpr,  # divides 128
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides 128 in the block formats
    PARTS: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_R]: columns of the linear, over one part of K."""
    n = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    STEPS: tl.constexpr = (K + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS)
    x_row_ptr = x_ptr + r.to(tl.int64)[None, :] * x_stride
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for step in range(STEPS):
        first = (part * STEPS + step) * BLOCK_K
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptr + k[:, None], (r < R)[None, :] & (k < K)[:, None], other=0.0)
        if FORMAT == "nvfp4":
            weight = load_nvfp4(weight_ptr, scale_ptr, n, first, N, K, BLOCK_K)
        else:
            weight = tl.load(weight_ptr + n[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :], other=0)
            if FORMAT != "bf16":
                weight = decode_e4m3(weight)
        if FORMAT == "block":
            scale_at = (block * BLOCK_N // BLOCK) * ((K + BLOCK - 1) // BLOCK) + first // BLOCK
            scale = tl.load(scale_ptr + scale_at, first < K, other=0.0).to(tl.float32)
            total += dot_split(weight, x, tl.zeros((BLOCK_N, BLOCK_R), tl.float32)) * scale
        elif FORMAT == "row_block":
            scale_at = n * ((K + BLOCK - 1) // BLOCK) + first // BLOCK
            scales = tl.load(scale_ptr + scale_at, (n < N) & (first < K), other=0.0).to(tl.float32)
            total += dot_split(weight, x, tl.zeros((BLOCK_N, BLOCK_R), tl.float32)) * scales[:, None]
        else:
            total = dot_split(weight, x, total)
    if FORMAT == "row":
        scale = tl.load(scale_ptr + n * scale_stride, n < N, other=0.0).to(tl.float32)
        total *= scale[:, None]
    if FORMAT == "nvfp4":
        total *= E2M1_IN_MULTIPLIER
        total *= tl.load(multiplier_ptr)
    return total


@triton.jit
def store_tile(total, r, block, part, out_ptr, R, N, BLOCK_N: tl.constexpr):
    n = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = (part * R + r).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), (r < R)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["R"])
def float_linear_kernel(
    x_ptr,  # as in `linear_tile`
    weight_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,  # [R, N], or float32 [PARTS, R, N]
    R,
    N,
    x_stride,
    scale_stride,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    # Programs that share a weight tile run at the same time, so that it is loaded from memory once.
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.program_id(1)
    part = tl.program_id(2)
    total = linear_tile(
        r,
        block,
        part,
        x_ptr,
        weight_ptr,
        scale_ptr,
        multiplier_ptr,
        R,
        N,
        x_stride,
        scale_stride,
        K,
        FORMAT,
        BLOCK_N,
        BLOCK_R,
        BLOCK_K,
        PARTS,
    )
    store_tile(total, r, block, part, out_ptr, R, N, BLOCK_N)


@triton.jit
def float_linear_sum_kernel(
    parts_ptr,  # float32 [PARTS, size]
    out_ptr,  # [size]
    size,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Adds the parts, first to last."""
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    total = tl.zeros((COUNT,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * size + place, place < size, other=0.0)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), place < size)


def prefill_tile(x: Tensor, n: int, kind: str) -> Tile:
    """Square tiles, small ones for few columns; narrower ones for float32 rows, which are split into three terms.

    E4M3 takes time to decode: narrow tiles leave resources for other programs, which multiply meanwhile.
    """
    if x.dtype == torch.float32:
        return Tile(64, 64, 1, 32, num_warps=4, num_stages=2)
    if n < 2048:
        return Tile(64, 64, 1, 64, num_warps=4, num_stages=3)
    if kind in ("block", "row"):
        return Tile(64, 128, 1, 128, num_warps=4, num_stages=3 if has_large_shared_memory() else 2)
    return Tile(128, 64, 1, 128, num_warps=8, num_stages=3)


def _launch(x: Tensor, weight: FloatWeight, tile: Tile, out_dtype: torch.dtype | None) -> Tensor:
    rows, k = x.shape
    n = weight.codes.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    parts = out if tile.split == 1 else torch.empty(tile.split, rows, n, dtype=torch.float32, device=x.device)
    grid = (ceil_div(rows, tile.block_r), ceil_div(n, tile.block_n), tile.split)
    float_linear_kernel[grid](
        x,
        weight.codes,
        weight.scale,
        weight.multiplier,
        parts,
        rows,
        n,
        x.stride(0),
        0 if weight.scale is None or weight.scale.numel() == 1 else 1,
        K=k,
        FORMAT=weight.kind,
        BLOCK_N=tile.block_n,
        BLOCK_R=tile.block_r,
        BLOCK_K=tile.block_k,
        PARTS=tile.split,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if tile.split > 1:
        float_linear_sum_kernel[(ceil_div(out.numel(), 256),)](
            parts, out, out.numel(), PARTS=tile.split, COUNT=256, num_warps=2
        )
    return out


def _decode(x: Tensor, weight: FloatWeight, out_dtype: torch.dtype | None) -> Tensor:
    return _launch(x, weight, decode_tile(x, weight.codes.shape[0], weight.kind), out_dtype)


def _prefill(x: Tensor, weight: FloatWeight, out_dtype: torch.dtype | None) -> Tensor:
    return _launch(x, weight, prefill_tile(x, weight.codes.shape[0], weight.kind), out_dtype)


def fp8_block_linear(x, weight, scale, out_dtype=None):
    return _decode(x, FloatWeight("block", weight.view(torch.uint8), scale.contiguous()), out_dtype)


def fp8_block_matmul(x, weight, scale, out_dtype=None):
    return _prefill(x, FloatWeight("block", weight.view(torch.uint8), scale.contiguous()), out_dtype)


def fp8_row_block_linear(x, weight, scale, out_dtype=None):
    return _decode(x, FloatWeight("row_block", weight.view(torch.uint8), scale.contiguous()), out_dtype)


def fp8_row_linear(x, weight, scale, out_dtype=None):
    return _decode(x, FloatWeight("row", weight.view(torch.uint8), scale.contiguous()), out_dtype)


def fp8_row_matmul(x, weight, scale, out_dtype=None):
    return _prefill(x, FloatWeight("row", weight.view(torch.uint8), scale.contiguous()), out_dtype)


def nvfp4_linear(x, packed, scale, multiplier, out_dtype=None):
    return _decode(x, FloatWeight("nvfp4", packed, scale.contiguous().view(torch.uint8), multiplier), out_dtype)


def nvfp4_matmul(x, packed, scale, multiplier, out_dtype=None):
    return _prefill(x, FloatWeight("nvfp4", packed, scale.contiguous().view(torch.uint8), multiplier), out_dtype)


def bf16_linear(x, weight, out_dtype=None):
    return _decode(x, FloatWeight("bf16", weight, None), out_dtype)


def bf16_matmul(x, weight, out_dtype=None):
    return _prefill(x, FloatWeight("bf16", weight, None), out_dtype)
