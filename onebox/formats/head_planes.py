"""An INT8 matrix in two planes, so that a reader can bound a product by the first and complete it by the second.

A code c, -128..127, is 4 h + l with h = c >> 2, -32..31, and l = c & 3.

    high   uint8 [K/128, N/16, 1536]   tiles of 16 rows and 128 columns. 1,024 bytes with the upper four bits of h, a
                                       tile of INT4 (`fragments.py`); then 512 bytes with its lowest two bits, in the
                                       order g 8 | t 4 | k16 2 | r8 2 | k4 4: a byte has those of kt, j at bit
                                       4 kt + 2 j
    low    uint8 [N, K/4]              row after row, so that one row is one contiguous range; of a group's 32 bytes,
                                       byte i has l of the columns i, 32 + i, 64 + i, 96 + i, the lowest bits first
    radius float32 [N]                 Euclidean length of l - 1.5 over a row

With x any row, |sum (l - 1.5) x| <= radius |x|: the high plane, sum 4 h x, tells the product to within
1.5 sum x +- radius |x|, about 1.12 sqrt(K) |x| steps of the row's scale.
"""

import torch
from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS, TILE_ROWS, from_fragments, to_fragments
from onebox.spec.errors import MismatchError

__all__ = [
    "HIGH_TILE_BYTES",
    "LOW_CENTRE",
    "high_codes",
    "join_planes",
    "low_codes",
    "split_planes",
]

HIGH_TILE_BYTES = 1536
LOW_CENTRE = 1.5
"""The middle of a low code's range."""

_LOW_BITS = 2
_NIBBLE_BYTES = 1024


def split_planes(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(high, low, radius) of int8 codes [N, K] in whole tiles."""
    num_rows, num_columns = codes.shape
    if codes.dtype != torch.int8 or num_rows % TILE_ROWS or num_columns % TILE_COLUMNS:
        raise MismatchError(
            f"Planes need int8 codes in whole tiles of {TILE_ROWS} x {TILE_COLUMNS}, "
            f"not {codes.dtype} {list(codes.shape)}."
        )
    rest = codes & 3
    radius = (rest.to(torch.float32) - LOW_CENTRE).square().sum(1).sqrt()
    return _pack_high(codes >> _LOW_BITS), _pack_low(rest), radius


def join_planes(high: Tensor, low: Tensor) -> Tensor:
    """int8 codes [N, K]: the inverse of `split_planes`."""
    return (high_codes(high) << _LOW_BITS) | low_codes(low)


def high_codes(high: Tensor) -> Tensor:
    """h, int8 [N, K]."""
    upper = from_fragments(high[..., :_NIBBLE_BYTES], 4)
    pairs = high[..., _NIBBLE_BYTES:]
    # j 2 | kt 2 | 512, as in a tile of INT8
    parts = [(pairs >> (4 * kt + 2 * j)) & 3 for j in range(2) for kt in range(2)]
    return (upper << 2) | from_fragments(torch.cat(parts, dim=-1), 8)


def low_codes(low: Tensor) -> Tensor:
    """l, int8 [N, K]."""
    num_rows, width = low.shape
    by_group = low.reshape(num_rows, -1, TILE_COLUMNS // 4)
    fields = [(by_group >> (_LOW_BITS * field)) & 3 for field in range(4)]
    return torch.stack(fields, dim=2).reshape(num_rows, 4 * width).view(torch.int8)


def _pack_high(codes: Tensor) -> Tensor:
    """Tiles of h, int8 [N, K]."""
    upper = to_fragments(codes >> 2, 4)
    lower = to_fragments(codes & 3, 8)
    groups, num_tiles, _ = lower.shape
    first, second = lower.reshape(groups, num_tiles, 2, 2, -1).unbind(2)  # j; then kt
    by_kt = first | (second << 2)
    return torch.cat((upper, by_kt[:, :, 0] | (by_kt[:, :, 1] << 4)), dim=2)


def _pack_low(codes: Tensor) -> Tensor:
    """uint8 [N, K/4] of l, int8 [N, K]."""
    num_rows, width = codes.shape
    fields = codes.view(torch.uint8).reshape(num_rows, -1, 4, TILE_COLUMNS // 4).unbind(2)
    packed = fields[0] | (fields[1] << 2) | (fields[2] << 4) | (fields[3] << 6)
    return packed.reshape(num_rows, width // 4)
