"""Integer weights in the order of int8 tensor-core operands, so that kernels load them without rearranging.

A tile is 16 rows (output columns of the linear) by 128 columns (one quantisation group). Its bytes are in the order of
the m16n8k32 MMA's A fragments, so that a warp loads 1,024 contiguous bytes and only reinterprets registers:

    byte index, slowest to fastest   kt 2 | g 8 | t 4 | k16 2 | r8 2 | k4 4          = 1,024
    row in the tile                  r8 * 8 + g
    column in a half of the tile     t * 16 + kt * 8 + k16 * 4 + k4                  0..63
    half                             j: columns 64 j .. 64 j + 63

    INT4, 1,024 bytes   one byte holds both halves: low nibble j = 0, high nibble j = 1, each in two's complement.
                        Masking a byte with 0xF0 gives 16 times the code of j = 1 as a signed byte, shifting it left
                        first that of j = 0: no zero point, no sign extension.
    INT8, 2,048 bytes   the half j = 0 in full, then the half j = 1, codes unchanged.

Tiles are group-major, [K/128, N/16, bytes], so that neighbouring programs read neighbouring bytes at each step along K;
experts are row-major, [N/16, K/128, bytes], so that one program reads one contiguous range.
"""

import torch
from torch import Tensor

from onebox.spec.errors import MismatchError

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "from_fragments", "rows_of_tiles", "tile_index", "to_fragments"]

TILE_ROWS = 16
TILE_COLUMNS = 128


def to_fragments(codes: Tensor, bits: int, *, group_major: bool = True) -> Tensor:
    """int8 codes [N, K] to uint8 tiles [K/128, N/16, 128 * 2 * bits], or [N/16, K/128, ...] if not group-major."""
    rows, columns = codes.shape
    if codes.dtype != torch.int8 or rows % TILE_ROWS or columns % TILE_COLUMNS or bits not in (4, 8):
        raise MismatchError(
            f"Fragments need 4- or 8-bit codes, int8, in whole tiles of {TILE_ROWS} x {TILE_COLUMNS}, "
            f"not {bits}-bit {codes.dtype} {list(codes.shape)}."
        )
    # row = (n, r8, g); column = (k, j, t, kt, k16, k4)
    split = codes.reshape(rows // 16, 2, 8, columns // 128, 2, 4, 2, 2, 4)
    # (n, k, j, kt, g, t, k16, r8, k4)
    halves = split.permute(0, 3, 4, 6, 2, 5, 7, 1, 8).reshape(rows // 16, columns // 128, 2, 1024).view(torch.uint8)
    if bits == 8:
        tiles = halves.reshape(rows // 16, columns // 128, 2048)
    else:
        tiles = (halves[:, :, 0] & 0xF) | (halves[:, :, 1] << 4)
    return (tiles.transpose(0, 1) if group_major else tiles).contiguous()


def from_fragments(tiles: Tensor, bits: int, *, group_major: bool = True) -> Tensor:
    """The inverse of `to_fragments`: int8 codes [N, K]."""
    if tiles.dtype != torch.uint8 or tiles.ndim != 3 or tiles.shape[-1] != 256 * bits:
        raise MismatchError(f"Tiles must be uint8 [., ., {256 * bits}], not {tiles.dtype} {list(tiles.shape)}.")
    by_row = tiles.transpose(0, 1) if group_major else tiles
    n, k = by_row.shape[:2]
    if bits == 8:
        halves = by_row.reshape(n, k, 2, 1024).view(torch.int8)
    else:
        signed = by_row.contiguous().view(torch.int8)
        # An arithmetic right shift extends the sign; the low nibble is first shifted up to the sign bit.
        halves = torch.stack(((signed << 4) >> 4, signed >> 4), dim=2)
    split = halves.reshape(n, k, 2, 2, 8, 4, 2, 2, 4)
    # (n, r8, g, k, j, t, kt, k16, k4)
    return split.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(n * 16, k * 128).contiguous()


def rows_of_tiles(tiles: Tensor) -> Tensor:
    """A view int32 [N/16, r8 2, g 8, ...] of group-major tiles [K/128, N/16, bytes]: `tile_index` finds rows in it."""
    groups, count, width = tiles.shape
    # Four neighbouring codes of a row, or of its two halves, are one word: (k, n, (j, kt), g, t, k16, r8).
    words = tiles.view(torch.int32).view(groups, count, width // 512, 8, 4, 2, 2)
    return words.permute(1, 6, 3, 0, 2, 4, 5)


def tile_index(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows, int64 [n], are in `rows_of_tiles`."""
    return rows // TILE_ROWS, rows % TILE_ROWS // 8, rows % 8
