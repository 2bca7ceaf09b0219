"""Float weights as operands of a warp's MMAs, loaded as the MMA wants them: no shuffle and no shared memory.

For linears and experts of a decode step. A warp takes blocks of 128 columns of 16 matrix rows, or of a few times 16. A
thread loads neighbouring columns of a row, 16 bytes at a time, and an MMA's operand has 4 of them side by side where it
has 64 columns, 8 where it has 128: weights and rows have the same permutation along K, so their product is the same.

    fp8, bf16   columns   half 2 | t 4 | s 4 | j 4         place   half 2 | s 4 | t 4 | j 4
    nvfp4       columns   t 4 | s 4 | j 8                  place   s 4 | t 4 | j 8

t is the thread's place among the four of a row. Each block starts a new accumulator, for any number of rows.
"""

import triton
import triton.language as tl

from onebox.kernels.common.arithmetic import dot_split
from onebox.kernels.common.float_codes import decode_e2m1_quads, decode_e4m3

__all__ = [
    "COLUMNS",
    "load_block",
    "load_rows",
    "matrix_row",
    "operands",
    "row_operands",
    "sum_block",
    "thread_columns",
]

COLUMNS = tl.constexpr(128)  # of a block

# E2M1 bits are read as the lowest exponents of bfloat16; see `common/float_codes.py`.
_E2M1_IN_SCALE = tl.constexpr(2.0**118)


@triton.jit
def matrix_row(first, place, STEP: tl.constexpr, SECOND: tl.constexpr):
    """The matrix rows at some places of a warp's: STEP from one 16 to the next, SECOND from a 16's first 8 to the rest.

    16 neighbouring rows are STEP 16, SECOND 8; 8 gate rows and their up rows are STEP 8, SECOND I.
    """
    return first + place // 16 * STEP + place % 8 + place // 8 % 2 * SECOND


@triton.jit
def _inside(row, last_row):
    return row if last_row is None else tl.minimum(row, last_row)


@triton.jit
def load_block(
    weight_ptr,
    scale_ptr,  # nvfp4: uint8 [N, K/16]
    first_row,  # int64
    last_row,  # rows behind it are read as it, for a caller that does not store them; None: there are none
    column,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Codes of 16 * TILES rows from a column on, all loads issued together: what `operands` takes."""
    threads = tl.arange(0, 64 * TILES)[:, None]
    if FORMAT == "bf16":
        n = _inside(matrix_row(first_row, threads // 4, STEP, SECOND), last_row)
        at = weight_ptr + n * K + column + threads % 4 * 16 + tl.arange(0, 8)[None, :]
        loaded = (
            tl.load(at, eviction_policy="evict_first"),
            tl.load(at + 8, eviction_policy="evict_first"),
            tl.load(at + 64, eviction_policy="evict_first"),
            tl.load(at + 72, eviction_policy="evict_first"),
        )
    elif FORMAT == "nvfp4":
        n = _inside(matrix_row(first_row, tl.arange(0, 16 * TILES)[:, None], STEP, SECOND), last_row)
        at = weight_ptr + n * (K // 2) + column // 2 + tl.arange(0, 64)[None, :]
        # A thread's 32 columns have two scales, which it loads itself.
        scale_row = _inside(matrix_row(first_row, threads // 4, STEP, SECOND), last_row)
        scale_at = scale_ptr + scale_row * (K // 16) + column // 16 + threads % 4 * 2 + tl.arange(0, 2)[None, :]
        loaded = (tl.load(at, eviction_policy="evict_first"), tl.load(scale_at))  # type: ignore[assignment]
    else:
        n = _inside(matrix_row(first_row, tl.arange(0, 16 * TILES)[:, None], STEP, SECOND), last_row)
        at = weight_ptr + n * K + column + tl.arange(0, 64)[None, :]
        first = tl.load(at, eviction_policy="evict_first")
        loaded = (first, tl.load(at + 64, eviction_policy="evict_first"))  # type: ignore[assignment]
    return loaded


@triton.jit
def _byte_operand(codes):
    N: tl.constexpr = codes.shape[0]
    split = tl.reshape(decode_e4m3(codes), (N, 4, 4, 4))  # row t s j
    return tl.reshape(tl.permute(split, (0, 2, 1, 3)), (N, 64))  # row | s t j


@triton.jit
def _pair_operand(low, high):
    N: tl.constexpr = low.shape[0] // 4
    split = tl.reshape(tl.join(low, high), (N, 4, 2, 4, 2))  # row t s0 j s1
    return tl.reshape(tl.permute(split, (0, 4, 2, 1, 3)), (N, 64))  # row | s1 s0 t j


@triton.jit
def _nibble_operand(packed, scale_codes):
    N: tl.constexpr = packed.shape[0]
    scale = (decode_e4m3(scale_codes).to(tl.float32) * _E2M1_IN_SCALE).to(tl.bfloat16)  # [4 N, 2]
    spread = tl.reshape(tl.broadcast_to(scale[:, :, None], (4 * N, 2, 8)), (N, 64))
    first, second = decode_e2m1_quads(packed, spread)
    split = tl.reshape(tl.join(first, second), (N, 4, 4, 4, 2))  # row t s j0 j1
    return tl.reshape(tl.permute(split, (0, 2, 1, 4, 3)), (N, 128))  # row | s t j1 j0


@triton.jit
def operands(loaded, FORMAT: tl.constexpr):
    """The left operands of a block, bfloat16: two of 64 columns, or one of 128 for nvfp4, 2^8 too small."""
    if FORMAT == "bf16":
        result = (_pair_operand(loaded[0], loaded[1]), _pair_operand(loaded[2], loaded[3]))
    elif FORMAT == "nvfp4":
        result = (_nibble_operand(loaded[0], loaded[1]),)  # type: ignore[assignment]
    else:
        result = (_byte_operand(loaded[0]), _byte_operand(loaded[1]))
    return result


@triton.jit
def thread_columns(ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """(row [4 * ROWS, 1], column [4 * ROWS, 8]) that each thread of a warp loads first, for `load_rows`."""
    threads = tl.arange(0, 4 * ROWS)[:, None]
    return threads // 4, threads % 4 * (32 if FORMAT == "nvfp4" else 16) + tl.arange(0, 8)[None, :]


@triton.jit
def load_rows(x_at, is_there, FORMAT: tl.constexpr):
    """A block's columns of the rows, 32 of each thread, from pointers [4 * ROWS, 8] of `thread_columns`."""
    third = 16 if FORMAT == "nvfp4" else 64
    return (
        tl.load(x_at, mask=is_there, other=0.0),
        tl.load(x_at + 8, mask=is_there, other=0.0),
        tl.load(x_at + third, mask=is_there, other=0.0),
        tl.load(x_at + third + 8, mask=is_there, other=0.0),
    )


@triton.jit
def _half_rows(low, high):
    ROWS: tl.constexpr = low.shape[0] // 4
    split = tl.reshape(tl.join(low, high), (ROWS, 4, 2, 4, 2))  # row t s0 j s1
    return tl.reshape(tl.permute(split, (4, 2, 1, 3, 0)), (64, ROWS))  # s1 s0 t j | row


@triton.jit
def row_operands(loaded, FORMAT: tl.constexpr):
    """The right operands of a block, for the left ones of `operands`."""
    if FORMAT == "nvfp4":
        ROWS: tl.constexpr = loaded[0].shape[0] // 4
        joined = tl.join(tl.join(loaded[0], loaded[1]), tl.join(loaded[2], loaded[3]))
        split = tl.reshape(joined, (ROWS, 4, 8, 2, 2))  # row t j s0 s1
        result = (tl.reshape(tl.permute(split, (4, 3, 1, 2, 0)), (128, ROWS)),)  # s1 s0 t j | row
    else:
        result = (_half_rows(loaded[0], loaded[1]), _half_rows(loaded[2], loaded[3]))  # type: ignore[assignment]
    return result


@triton.jit
def sum_block(weights, rows, total, FORMAT: tl.constexpr):
    """Total plus the product of a block, from operands."""
    total = dot_split(weights[0], rows[0], total)
    if FORMAT != "nvfp4":
        total = dot_split(weights[1], rows[1], total)
    return total
