"""Integer experts in the order in which kernels read them: the tiles of `fragments`, with gate and up rows in one tile.

A tile is 16 rows by one group of 128 columns, 256 bytes for each of a code's 2, 3 or 4 bits (`fragments`, row-major);
its 16 scales are contiguous, in their stored dtype. A weight is its code times its row's scale in that group; there is
no zero point. The bits of gate/up and of down may differ.

    down      tiles  uint8 [E, H/16,  I/128, 256 * bits]      row r of tile n     row 16 n + r of the matrix [H, I]
              scales       [E, H/16,  I/128, 16]
    gate/up   tiles  uint8 [E, 2I/16, H/128, 256 * bits]      row r < 8 of tile n   gate row 8 n + r
              scales       [E, 2I/16, H/128, 16]              row 8 + r of tile n   up row 8 n + r

A checkpoint's fused matrix [2I, H] has all I gate rows first. Here one tile contains gate and up of 8
intermediate values, so one program computes SiLU(gate) * up without another pass.
"""

from torch import Tensor

from onebox.formats.fragments import TILE_COLUMNS, TILE_ROWS, from_fragments, to_fragments
from onebox.spec.errors import MismatchError

__all__ = ["pack_down", "pack_gate_up", "tile_bits", "unpack_down", "unpack_gate_up"]


def tile_bits(tiles: Tensor) -> int:
    """The bits of a code in expert tiles [..., 256 * bits]: 2, 3 or 4."""
    bits, rest = divmod(tiles.shape[-1], 2 * TILE_COLUMNS)
    if rest or bits not in (2, 3, 4):
        raise MismatchError(f"A tile of an expert has 512, 768 or 1,024 bytes, not {tiles.shape[-1]}.")
    return bits


def pack_down(codes: Tensor, scales: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """(tiles, scales) of int8 codes [E, N, K], signed numbers of 2, 3 or 4 `bits`, and their scales [E, N, K/128]."""
    experts, rows, columns = codes.shape
    if rows % TILE_ROWS or columns % TILE_COLUMNS or scales.shape != (experts, rows, columns // TILE_COLUMNS):
        raise MismatchError(
            f"Experts need whole tiles of {TILE_ROWS} x {TILE_COLUMNS} with a scale per row and group, "
            f"not codes {list(codes.shape)} with scales {list(scales.shape)}."
        )
    tiles = to_fragments(codes.reshape(-1, columns), bits, group_major=False)
    by_tile = scales.reshape(experts, rows // TILE_ROWS, TILE_ROWS, -1).transpose(2, 3).contiguous()
    return tiles.reshape(experts, rows // TILE_ROWS, columns // TILE_COLUMNS, -1), by_tile


def unpack_down(tiles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_down`: (codes int8 [E, N, K], scales [E, N, K/128])."""
    codes = from_fragments(tiles.flatten(0, 1), tile_bits(tiles), group_major=False)
    return codes.reshape(len(tiles), -1, codes.shape[-1]), scales.transpose(2, 3).flatten(1, 2).contiguous()


def pack_gate_up(codes: Tensor, scales: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """(tiles, scales) of int8 codes [E, 2I, K], gate rows before up rows, and their scales [E, 2I, K/128]."""
    return pack_down(_paired(codes), _paired(scales), bits)


def unpack_gate_up(tiles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_gate_up`: (codes int8 [E, 2I, K], scales [E, 2I, K/128]), gate rows before up rows."""
    codes, by_row = unpack_down(tiles, scales)
    return _unpaired(codes), _unpaired(by_row)


def _paired(rows: Tensor) -> Tensor:
    """[E, 2I, ...] with all gate rows first, to alternating blocks of 8 gate rows and 8 up rows."""
    if rows.shape[1] % TILE_ROWS:
        raise MismatchError(f"A tile has 8 gate rows and 8 up rows; {rows.shape[1]} rows do not fill whole tiles.")
    return rows.reshape(len(rows), 2, -1, TILE_ROWS // 2, rows.shape[-1]).transpose(1, 2).flatten(1, 3)


def _unpaired(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1, 2, TILE_ROWS // 2, rows.shape[-1]).transpose(1, 2).flatten(1, 3)
