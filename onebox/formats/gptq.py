"""GPTQ and AutoRound ("auto_gptq") packing of 2-, 3-, 4- and 8-bit matrices, shown for 4 bits.

    qweight int32 [in/8, out]      word (r, o): columns 8r..8r+7 of output row o, lowest nibble first
    qzeros  int32 [groups, out/8]  word (g, c): stored zero of output rows 8c..8c+7 in group g, lowest nibble first
    scales  fp16  [groups, out]
    g_idx   int32 [in]             group of each column; absent in AutoRound packs, k // group_size without act-order

    bit of qweight[r, o]   31..28  27..24  23..20  19..16  15..12  11..8    7..4    3..0
    input column k          8r+7    8r+6    8r+5    8r+4    8r+3    8r+2    8r+1     8r

    W[o, k] = scales[g, o] * (nibble - zero point)      zero point = stored zero + zeros_offset

zeros_offset is 1 in GPTQ v1 and AutoRound ("stored is zp - 1"; symmetric words read 0x77777777) and 0 in gptq_v2.

Eight consecutive input columns of one output row share a word, as in compressed-tensors' `weight_packed` [out, in/8],
and both store code + 8. So the words are equal and the matrix of words is transposed: `gptq_to_packed` is a transpose.
The same holds for qzeros at offset 0 and `weight_zero_point`, and for the other widths: at 3 bits, 32 input columns of
one output row are 96 bits in three words of a column of qweight [3 in/32, out], lowest bits first.
"""

import math

import torch
from torch import Tensor

from onebox.formats.bits import pack_words, unpack_words
from onebox.formats.group_int import GroupInt
from onebox.spec.errors import MismatchError, UnsupportedError

__all__ = ["gptq_to_packed", "pack_gptq", "unpack_gptq"]


def gptq_to_packed(words: Tensor) -> Tensor:
    """`qweight` int32 [..., in/8, out] to `weight_packed` int32 [..., out, in/8]; its own inverse, any bit width."""
    if words.dtype != torch.int32 or words.ndim < 2:
        raise MismatchError(f"Packed words must be an int32 matrix, not {words.dtype} {list(words.shape)}.")
    return words.transpose(-2, -1).contiguous()


def unpack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    zeros_offset: int = 1,
    bits: int = 4,
    group_size: int | None = None,
) -> GroupInt:
    """Unpacks one module's GPTQ tensors (shapes above).

    `group_size` is the config's value; without it the groups are taken from g_idx, else assumed to be of equal size.
    Zero points that are all the middle become None, and so does a g_idx equal to k // group_size.
    """
    if qweight.ndim != 2 or qzeros.ndim != 2 or scales.ndim != 2:
        raise MismatchError("GPTQ tensors qweight, qzeros and scales must be 2-D tensors of one module.")
    columns, (num_groups, rows) = qweight.shape[0] * 32 // bits, scales.shape
    if qweight.shape[1] != rows or qzeros.shape[0] != num_groups:
        raise MismatchError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} disagree."
        )
    size, group_index = _read_groups(g_idx, columns, num_groups, group_size)
    return GroupInt(
        codes=unpack_words(gptq_to_packed(qweight), bits, columns),
        scales=scales.t().contiguous(),
        zeros=_read_zeros(qzeros, rows, bits, zeros_offset),
        group_index=group_index,
        group_size=size,
        bits=bits,
    )


def pack_gptq(matrix: GroupInt, zeros_offset: int = 1) -> dict[str, Tensor]:
    """`qweight`, `qzeros`, `scales`, and `g_idx` when the matrix has a group index: the inverse of `unpack_gptq`."""
    rows, columns = matrix.codes.shape
    per_unit = 32 // math.gcd(32, matrix.bits)
    if rows % per_unit or columns % per_unit:
        raise UnsupportedError(f"GPTQ packs whole words only: [{rows}, {columns}] must be multiples of {per_unit}.")
    _check_offset(zeros_offset)
    zeros = torch.zeros_like(matrix.scales, dtype=torch.int8) if matrix.zeros is None else matrix.zeros
    stored = zeros.to(torch.int16) - zeros_offset
    middle = 2 ** (matrix.bits - 1)
    if bool(((stored < -middle) | (stored >= middle)).any()):
        raise UnsupportedError(f"A zero point of this matrix has no {matrix.bits}-bit form at offset {zeros_offset}.")
    tensors = {
        "qweight": gptq_to_packed(pack_words(matrix.codes, matrix.bits)),
        "qzeros": pack_words(stored.to(torch.int8).t(), matrix.bits),
        "scales": matrix.scales.t().contiguous(),
    }
    return tensors if matrix.group_index is None else {**tensors, "g_idx": matrix.group_index}


def _read_zeros(qzeros: Tensor, rows: int, bits: int, zeros_offset: int) -> Tensor | None:
    """Signed zeros int8 [out, groups], or None when all are 0. A v1 nibble of 15 means zero point 16, signed 8."""
    _check_offset(zeros_offset)
    zeros = unpack_words(qzeros, bits, rows).t().to(torch.int16) + zeros_offset
    if bool((zeros > 127).any()):
        raise UnsupportedError("An 8-bit zero point of 256 (stored 255 in GPTQ v1) is not supported.")
    return zeros.to(torch.int8).contiguous() if bool(zeros.any()) else None


def _read_groups(
    g_idx: Tensor | None, columns: int, num_groups: int, group_size: int | None
) -> tuple[int, Tensor | None]:
    """The group size, and the group index if it differs from k // group size."""
    if g_idx is None:
        if group_size is None and columns % num_groups:
            raise MismatchError(f"{columns} columns in {num_groups} groups are uneven: give the group size.")
        return group_size or columns // num_groups, None
    if g_idx.shape != (columns,):
        raise MismatchError(f"g_idx must have {columns} entries, not shape {list(g_idx.shape)}.")
    index = g_idx.to(torch.int32)
    size = group_size or max(1, int((index == 0).sum()))  # without act-order group 0 is full, even if the last is not
    plain = torch.arange(columns, dtype=torch.int32, device=index.device) // size
    return (size, None) if torch.equal(index, plain) else (size, index)


def _check_offset(zeros_offset: int) -> None:
    if zeros_offset not in (0, 1):
        raise UnsupportedError(f"GPTQ stores zero points minus 1 (v1) or minus 0 (v2), not minus {zeros_offset}.")
