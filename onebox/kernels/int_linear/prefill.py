"""Integer linears for many tokens: blocks of matrix rows by tokens, weights decoded by `common/int_tiles.py`.

Block sizes and the order along K are constants, so a token's bits do not depend on the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS
from onebox.kernels.common.int_tiles import WORDS, in_tile_order, sum_tiles
from onebox.kernels.common.launch import ceil_div

__all__ = ["int4_matmul", "int8_matmul"]

_BAND = 8
"""Blocks of tokens that are multiplied with all matrix rows before the next ones: their data stays in the L2 cache."""


@triton.jit
def _block_of_program(num_token_blocks, num_row_blocks, BAND: tl.constexpr):
    """(block of tokens, block of rows): a band of token blocks, row block after row block, then the next band."""
    program = tl.program_id(0)
    in_band = BAND * num_row_blocks
    first = program // in_band * BAND
    width = tl.minimum(num_token_blocks - first, BAND)
    return first + program % in_band % width, program % in_band // width


@triton.jit(do_not_specialize=["T", "num_tiles"])
def matmul_kernel(
    x_ptr,  # [T, K], in tile order
    tiles_ptr,  # int32 [K/128, tiles, 64 * BITS]
    scale_ptr,  # [K/128, N] or [N]
    out_ptr,  # [T, N]
    T,
    N,
    num_tiles,
    K: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    BAND: tl.constexpr,
):
    token_block, row_block = _block_of_program(tl.cdiv(T, TOKENS), tl.cdiv(num_tiles, TILES), BAND)
    token = token_block * TOKENS + tl.arange(0, TOKENS)
    tile = row_block * TILES + tl.arange(0, TILES)
    row = row_block * (TILES * 16) + tl.arange(0, TILES * 16)
    TILE_WORDS: tl.constexpr = 64 * BITS
    tile_at = tl.minimum(tile, num_tiles - 1).to(tl.int64)[:, None] * TILE_WORDS + tl.arange(0, WORDS)[None, :]
    totals = sum_tiles(
        x_ptr + tl.minimum(token, T - 1).to(tl.int64)[None, :] * K + tl.arange(0, 128)[:, None],
        (tiles_ptr + tile_at,),
        num_tiles.to(tl.int64) * TILE_WORDS,
        (scale_ptr + tl.minimum(row, N - 1),),
        N,
        K // 128,
        BITS,
    )
    total = totals[0]
    if BITS == 8:
        total *= tl.load(scale_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + token.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(row < N)[:, None] & (token < T)[None, :])


def int4_matmul(x, weight, weight_scale):
    return _matmul(x, weight, weight_scale, 4)


def int8_matmul(x, weight, weight_scale):
    return _matmul(x, weight, weight_scale, 8)


def _matmul(x: Tensor, weight: Tensor, weight_scale: Tensor, bits: int) -> Tensor:
    """[T, N] of x's dtype."""
    num_tokens, num_columns = len(x), weight_scale.shape[-1]
    num_groups, num_tiles = weight.shape[:2]
    out = torch.empty((num_tokens, num_columns), dtype=x.dtype, device=x.device)
    shape = _block_shape(x.dtype)
    blocks = ceil_div(num_tokens, shape["TOKENS"]) * ceil_div(num_tiles, shape["TILES"])
    if blocks:
        matmul_kernel[(blocks,)](
            in_tile_order(x),
            weight.view(torch.int32),
            weight_scale,
            out,
            num_tokens,
            num_columns,
            num_tiles,
            K=num_groups * TILE_COLUMNS,
            BITS=bits,
            **shape,
        )
    return out


def _block_shape(dtype: torch.dtype) -> dict[str, int]:
    """Block sizes and compile options of a program, which never depend on the number of tokens.

    A float32 number is three terms on the tensor cores, which needs registers: small blocks.
    """
    is_float32 = dtype == torch.float32
    return {
        "TOKENS": 32 if is_float32 else 64,
        "TILES": 4 if is_float32 else 8,
        "BAND": _BAND,
        "num_warps": 4 if is_float32 else 8,
        "num_stages": 2 if is_float32 else 3,
    }
