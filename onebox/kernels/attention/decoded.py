"""Packed pages decoded for a prefill of many tokens, in Triton: keys and values of a slice of the context, in order.

    key, value    [S, KV, tokens of a slice, D]    plane after plane (`planes.py`), in the dtype of their products
    factors       float32 [S, KV, tokens]          of scores and of softmax weights: stored scales times constants

What tensor cores multiply is here bit for bit what a kernel that reads the pages gives them: levels or codes without
their scale. The slices of all sequences have `SLICE_TOKENS` tokens together: the space does not grow with the context.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, KVPages
from onebox.kernels.attention.pages import page_constants, page_tensors
from onebox.kernels.attention.planes import WEIGHT_SHIFT, load_keys, load_tables, load_values, store_decoded
from onebox.spec.pieces import SLICE_TOKENS

__all__ = ["Decoded", "decode_slice", "new_slice", "slice_tokens"]

_BLOCK = 32
"""Tokens per program."""
_MULTIPLE = 128
"""A slice holds a multiple of this many tokens: whole tiles of queries."""


class Decoded(NamedTuple):
    """A slice of each sequence, in the layout of the module's docstring."""

    key: Tensor
    key_factor: Tensor
    value: Tensor
    value_factor: Tensor


@triton.jit(do_not_specialize=["page_table_ptr", "start_ptr", "cu_rows_ptr", "first", "num_tokens", "table_stride"])
def paged_attention_decode_slice_kernel(
    page_table_ptr,  # int32 [S, pages], stride table_stride
    start_ptr,  # int32 [S]
    cu_rows_ptr,  # int32 [S + 1]
    key_codes_ptr,
    key_scale_ptr,
    key_levels_ptr,
    key_table_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_levels_ptr,
    value_table_ptr,
    key_ptr,  # the tensors of `Decoded`
    key_factor_ptr,
    value_ptr,
    value_factor_ptr,
    scale,  # of scores
    first,  # the slice's first token
    num_tokens,  # of the slice
    table_stride,
    KV: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # tokens that attention reads at a time, a divisor of P
):
    sequence = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.load(cu_rows_ptr + sequence + 1) - tl.load(cu_rows_ptr + sequence)
    stop = tl.load(start_ptr + sequence) + rows
    place = tl.program_id(0) * BLOCK
    # To the end of the last tile that is read: a weight of zero times what memory happened to hold could be NaN.
    if (first + place // TILE * TILE < stop) & (rows > 0):
        page = tl.load(page_table_ptr + sequence * table_stride + (first + place) // P).to(tl.int64)
        vectors = tl.multiple_of((page * KV + head) * P + (first + place) % P, BLOCK) + tl.arange(0, BLOCK)
        out = (sequence * KV + head) * num_tokens + place + tl.arange(0, BLOCK)
        key_table, value_table = load_tables(key_table_ptr, value_table_ptr, KEY_BITS, VALUE_BITS)
        key = key_codes_ptr, key_scale_ptr, key_levels_ptr, key_table
        value = value_codes_ptr, value_scale_ptr, value_levels_ptr, value_table
        store_decoded(key_ptr, out, load_keys(key, vectors, D, KEY_BITS, key_ptr.dtype.element_ty, False), D)
        store_decoded(
            value_ptr, out, load_values(value, vectors, None, D, VALUE_BITS, value_ptr.dtype.element_ty, 0), D
        )
        tl.store(key_factor_ptr + out, tl.load(key_scale_ptr + vectors).to(tl.float32) * scale)
        factor = tl.load(value_scale_ptr + vectors).to(tl.float32)
        tl.store(value_factor_ptr + out, factor * WEIGHT_SHIFT if VALUE_BITS == 8 else factor)


def slice_tokens(num_sequences: int) -> int:
    """Tokens of each sequence in a slice."""
    return max(_MULTIPLE, SLICE_TOKENS // num_sequences // _MULTIPLE * _MULTIPLE)


def new_slice(pages: KVPages, num_sequences: int, num_tokens: int, query: Tensor) -> Decoded:
    """Space for `num_tokens` of each sequence."""
    shape = num_sequences, pages.kv_heads, num_tokens
    wide = *shape, query.shape[2]
    return Decoded(
        query.new_empty(wide, dtype=_dtype(query, pages.format.key_bits, is_key=True)),
        query.new_empty(shape, dtype=torch.float32),
        query.new_empty(wide, dtype=_dtype(query, pages.format.value_bits, is_key=False)),
        query.new_empty(shape, dtype=torch.float32),
    )


def decode_slice(
    pages: KVPages,
    page_table: Tensor,
    start: Tensor,
    cu_rows: Tensor,
    first: int,
    scale: float,
    decoded: Decoded,
    tile: int,
) -> None:
    """Decodes the tokens from `first` on that rows of a prefill see (arguments as there) into `decoded`.

    Whole tiles of `tile` tokens, a divisor of a page's.
    """
    num_sequences, kv_heads, num_tokens, dim = decoded.key.shape
    paged_attention_decode_slice_kernel[(num_tokens // _BLOCK, kv_heads, num_sequences)](
        page_table,
        start,
        cu_rows,
        *page_tensors(pages, dim),
        *decoded,
        scale,
        first,
        num_tokens,
        page_table.stride(0),
        **page_constants(pages, dim),
        BLOCK=_BLOCK,
        TILE=tile,
        num_warps=4,
    )


def _dtype(query: Tensor, bits: int, *, is_key: bool) -> torch.dtype:
    """As `softmax.operand_dtype`."""
    if query.dtype == torch.float32:
        return torch.float32
    return torch.float16 if bits < FP8_BITS or is_key else torch.bfloat16
