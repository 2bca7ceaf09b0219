"""compressed-tensors `pack-quantized`: integer matrices in 32-bit words, shown for 4 bits.

weight_packed      int32 [out, ceil(in/8)]      word (o, c): columns 8c..8c+7, lowest nibble first
weight_scale       any   [out, groups]          groups = 1 if there is one scale per row
weight_shape       int64 [2]                    out, in: the last word of a row may be padded (0 bits)
weight_zero_point  int32 [ceil(out/8), groups]  asymmetric only; packed along the OUTPUT: word (r, g) = rows 8r..8r+7
weight_g_idx       int32 [in]                   only if columns were reordered into groups

bit of weight_packed[o, c]   31..28  27..24  23..20  19..16  15..12  11..8    7..4    3..0
input column k                8c+7    8c+6    8c+5    8c+4    8c+3    8c+2    8c+1     8c

stored = code + 8 (INT8: code + 128, four to a word), zero points likewise;  W = (code - zero) * scale

At 3 bits (stored = code + 4) and 2 bits (code + 2) the codes of a row are one stream of bits too: column k is at bits
3k..3k+2 of the row, 32 columns in three words, and a row is ceil(3 in/32) words (`bits.py`). compressed-tensors packs
so from 0.17 on; earlier versions put 10 codes of 3 bits in a word, which is not read.
"""

import torch
from torch import Tensor

from onebox.formats.bits import pack_words, unpack_words
from onebox.formats.group_int import GroupInt
from onebox.spec.errors import MismatchError

__all__ = ["pack_quantized", "unpack_quantized"]


def pack_quantized(matrix: GroupInt) -> dict[str, Tensor]:
    """The module's tensors by suffix (layout above); optional ones only if the matrix has them."""
    tensors = {
        "weight_packed": pack_words(matrix.codes, matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape, dtype=torch.int64),
    }
    if matrix.zeros is not None:
        tensors["weight_zero_point"] = pack_words(matrix.zeros.t(), matrix.bits).t().contiguous()
    if matrix.group_index is not None:
        tensors["weight_g_idx"] = matrix.group_index
    return tensors


def unpack_quantized(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    group_size: int | None = None,
) -> GroupInt:
    """Unpacks one module's tensors; `group_size` is the config's value (None or -1: groups of equal size)."""
    rows, columns = (int(size) for size in weight_shape)
    if weight_packed.ndim != 2 or weight_packed.shape[0] != rows or weight_scale.ndim != 2:
        raise MismatchError(
            f"weight_packed {list(weight_packed.shape)} and weight_scale {list(weight_scale.shape)} "
            f"do not fit the weight_shape [{rows}, {columns}]."
        )
    return GroupInt(
        codes=unpack_words(weight_packed, bits, columns),
        scales=weight_scale,
        zeros=_read_zeros(weight_zero_point, rows, bits),
        group_index=weight_g_idx,
        group_size=_group_size(columns, weight_scale.shape[1], group_size),
        bits=bits,
    )


def _read_zeros(packed: Tensor | None, rows: int, bits: int) -> Tensor | None:
    """Signed zeros int8 [out, groups], or None when there are none or all are 0."""
    if packed is None:
        return None
    zeros = unpack_words(packed.t(), bits, rows).t().contiguous()
    return zeros if bool(zeros.any()) else None


def _group_size(columns: int, groups: int, told: int | None) -> int:
    if told is not None and told != -1:
        return told
    if columns % groups:
        raise MismatchError(f"{columns} columns in {groups} groups are uneven: give the group size.")
    return columns // groups
