"""Integer weights in the order of int8 tensor-core operands, so that kernels load them without rearranging.

A tile is 16 rows (output columns of the linear) by 128 columns (one quantisation group). Its bytes are in the order of
the m16n8k32 MMA's A fragments, so that a warp loads contiguous bytes and only reinterprets registers. An operand word
is four codes k4, one per byte; a thread (g, t) has 16 of them:

    row in the tile                  r8 * 8 + g
    column in the tile               j * 64 + t * 16 + kt * 8 + k16 * 4 + k4

    INT8, 2,048 bytes   j 2 | kt 2 | g 8 | t 4 | k16 2 | r8 2 | k4 4, slowest to fastest; codes unchanged.
    INT4, 1,024 bytes   kt 2 | g 8 | t 4 | k16 2 | r8 2 | k4 4; a byte has both codes of j: j = 1 above j = 0.
    INT3, 768 bytes     g 8 | t 4 | w 2 | r8 2 | k4 4, the bytes w = 0 and 1, then g 8 | t 4 | r8 2 | k4 4, those of
                        w = 2. Three bytes have the eight codes of j, kt, k16 (numbered 4 j + 2 kt + k16):

                            bits   7 6 5     4 3 2     1 0
                            w = 0  code 0    code 1    upper bits of code 6
                            w = 1  code 2    code 3    lowest bits of codes 6 and 7
                            w = 2  code 4    code 5    upper bits of code 7

    INT2, 512 bytes     g 8 | t 4 | k16 2 | r8 2 | k4 4; a byte has the codes of j, kt: 2 j + kt, from above.

Codes are in two's complement. Moved to the top of a byte whose other bits are masked off, a code of n bits is a signed
byte, 2^(8 - n) times the code: no zero point, no sign extension.

Tiles are group-major, [K/128, N/16, bytes], so that neighbouring programs read neighbouring bytes at each step along K;
experts are row-major, [N/16, K/128, bytes], so that one program reads one contiguous range.
"""

import torch
from torch import Tensor

from onebox.spec.errors import MismatchError

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "from_fragments", "rows_of_tiles", "tile_index", "to_fragments"]

TILE_ROWS = 16
TILE_COLUMNS = 128
_BITS = (2, 3, 4, 8)


def to_fragments(codes: Tensor, bits: int, *, group_major: bool = True) -> Tensor:
    """int8 codes [N, K] to uint8 tiles [K/128, N/16, 256 * bits], or [N/16, K/128, ...] if not group-major.

    Only the lowest `bits` bits of a code are stored.
    """
    rows, columns = codes.shape
    if codes.dtype != torch.int8 or rows % TILE_ROWS or columns % TILE_COLUMNS or bits not in _BITS:
        raise MismatchError(
            f"Fragments need codes of 2, 3, 4 or 8 bits, int8, in whole tiles of {TILE_ROWS} x {TILE_COLUMNS}, "
            f"not {bits}-bit {codes.dtype} {list(codes.shape)}."
        )
    # row = (n, r8, g); column = (k, j, t, kt, k16, k4)
    split = codes.reshape(rows // 16, 2, 8, columns // 128, 2, 4, 2, 2, 4).view(torch.uint8)
    # (n, k, j, kt, k16, g, t, r8, k4)
    words = split.permute(0, 3, 4, 6, 7, 2, 5, 1, 8)
    tiles = _PACK[bits](words).reshape(rows // 16, columns // 128, 256 * bits)
    return (tiles.transpose(0, 1) if group_major else tiles).contiguous()


def from_fragments(tiles: Tensor, bits: int, *, group_major: bool = True) -> Tensor:
    """The inverse of `to_fragments`: int8 codes [N, K]."""
    if tiles.dtype != torch.uint8 or tiles.ndim != 3 or tiles.shape[-1] != 256 * bits or bits not in _BITS:
        raise MismatchError(f"Tiles must be uint8 [., ., {256 * bits}], not {tiles.dtype} {list(tiles.shape)}.")
    by_row = tiles.transpose(0, 1) if group_major else tiles
    words = _UNPACK[bits](by_row.contiguous())
    n, k = words.shape[:2]
    # (n, r8, g, k, j, t, kt, k16, k4)
    return words.permute(0, 7, 5, 1, 2, 6, 3, 4, 8).reshape(n * 16, k * 128)


def rows_of_tiles(tiles: Tensor) -> Tensor:
    """A view int32 [N/16, r8 2, g 8, ...] of group-major tiles [K/128, N/16, bytes]: `tile_index` finds rows in it."""
    groups, count, width = tiles.shape
    # Four neighbouring codes of a row, or of its two halves, are one word: (k, n, (j, kt), g, t, k16, r8).
    words = tiles.view(torch.int32).view(groups, count, width // 512, 8, 4, 2, 2)
    return words.permute(1, 6, 3, 0, 2, 4, 5)


def tile_index(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows, int64 [n], are in `rows_of_tiles`."""
    return rows // TILE_ROWS, rows % TILE_ROWS // 8, rows % 8


# Packed bytes from codes uint8 [n, k, j, kt, k16, g, t, r8, k4], and the int8 codes back.


def _pack_int8(words: Tensor) -> Tensor:
    return words.permute(0, 1, 2, 3, 5, 6, 4, 7, 8)


def _unpack_int8(tiles: Tensor) -> Tensor:
    return _split(tiles.view(torch.int8), 2, 2, 8, 4, 2, 2, 4).permute(0, 1, 2, 3, 6, 4, 5, 7, 8)


def _pack_int4(words: Tensor) -> Tensor:
    low, high = words.permute(0, 1, 2, 3, 5, 6, 4, 7, 8).contiguous().unbind(2)
    return (low & 0xF) | (high << 4)


def _unpack_int4(tiles: Tensor) -> Tensor:
    bytes_ = _split(tiles, 2, 8, 4, 2, 2, 4)
    return torch.stack((_top(bytes_ << 4, 4), _top(bytes_, 4)), dim=2).permute(0, 1, 2, 3, 6, 4, 5, 7, 8)


def _pack_int3(words: Tensor) -> Tensor:
    code = words.flatten(2, 4).unbind(2)
    first = (code[0] << 5) | ((code[1] & 7) << 2) | ((code[6] & 6) >> 1)
    second = (code[2] << 5) | ((code[3] & 7) << 2) | ((code[6] & 1) << 1) | (code[7] & 1)
    third = (code[4] << 5) | ((code[5] & 7) << 2) | ((code[7] & 6) >> 1)
    both = torch.stack((first, second), dim=4)  # n k g t w r8 k4
    return torch.cat((both.flatten(2), third.flatten(2)), dim=2)


def _unpack_int3(tiles: Tensor) -> Tensor:
    first, second = _split(tiles[..., :512], 8, 4, 2, 2, 4).unbind(4)
    third = _split(tiles[..., 512:], 8, 4, 2, 4)
    codes = [_top(byte << shift, 3) for byte in (first, second, third) for shift in (0, 3)]
    codes.append(_top((first << 6) | ((second & 2) << 4), 3))
    codes.append(_top((third << 6) | ((second & 1) << 5), 3))
    return _split(torch.stack(codes, dim=2), 2, 2, 2)


def _pack_int2(words: Tensor) -> Tensor:
    code = words.permute(0, 1, 2, 3, 5, 6, 4, 7, 8).flatten(2, 3).unbind(2)
    return (code[0] << 6) | ((code[1] & 3) << 4) | ((code[2] & 3) << 2) | (code[3] & 3)


def _unpack_int2(tiles: Tensor) -> Tensor:
    bytes_ = _split(tiles, 8, 4, 2, 2, 4)
    codes = torch.stack([_top(bytes_ << shift, 2) for shift in (0, 2, 4, 6)], dim=2)
    return _split(codes, 2, 2).permute(0, 1, 2, 3, 6, 4, 5, 7, 8)


def _split(tensor: Tensor, *sizes: int) -> Tensor:
    """[n, k, a, ...] with a cut into dimensions of these sizes."""
    return tensor.reshape(*tensor.shape[:2], *sizes, *tensor.shape[3:])


def _top(bytes_: Tensor, bits: int) -> Tensor:
    """The upper bits of each byte as a signed number: an arithmetic right shift extends the sign."""
    return bytes_.view(torch.int8) >> (8 - bits)


_PACK = {2: _pack_int2, 3: _pack_int3, 4: _pack_int4, 8: _pack_int8}
_UNPACK = {2: _unpack_int2, 3: _unpack_int3, 4: _unpack_int4, 8: _unpack_int8}
