"""Packs codes of 2, 3, 4 or 8 bits into bytes and 32-bit words, lowest bits first.

Code i of a row is at bits i*b .. i*b+b-1 of that row, bit 0 being the lowest bit of byte 0:

    byte            0                 1                 2                 3
    bit      7 6 5 4 3 2 1 0   7 6 5 4 3 2 1 0   7 6 5 4 3 2 1 0   7 6 5 4 3 2 1 0     code of each bit:
    2 bit    3 3 2 2 1 1 0 0   7 7 6 6 5 5 4 4                                         8 codes = 2 bytes
    3 bit    2 2 1 1 1 0 0 0   5 4 4 4 3 3 3 2   7 7 7 6 6 6 5 5                       8 codes = 3 bytes
    4 bit    1 1 1 1 0 0 0 0   3 3 3 3 2 2 2 2   5 5 5 5 4 4 4 4   7 7 7 7 6 6 6 6     8 codes = 4 bytes
    8 bit    0 0 0 0 0 0 0 0   1 1 1 1 1 1 1 1   2 2 2 2 2 2 2 2   3 3 3 3 3 3 3 3     4 codes = 4 bytes

A word is four such bytes, little endian, so nibble i of an int32 is code i, and 32 codes of 3 bits fill three words
without a gap: codes 10 and 21 straddle two of them. All machines that onebox runs on are little endian; the byte views
below rely on it. In words the codes are signed: stored = code + 2**(bits-1).
"""

import math

import torch
from torch import Tensor

from onebox.spec.errors import MismatchError, UnsupportedError

__all__ = ["pack_bits", "pack_words", "unpack_bits", "unpack_words"]


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes, uint8 [..., n], to bytes, uint8 [..., n*bits/8]; at 2 and 3 bits n is a multiple of 8."""
    _check_width(bits, (2, 3, 4, 8))
    if codes.dtype != torch.uint8 or codes.shape[-1] % _codes_per_unit(bits):
        raise MismatchError(
            f"{bits}-bit codes must be uint8 in multiples of {_codes_per_unit(bits)}, "
            f"not {codes.dtype} of shape {list(codes.shape)}."
        )
    if bits == 8:
        return codes
    if bits == 4:
        pairs = _reinterpret(codes, torch.int16)  # low byte: even code, high byte: odd code
        return ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8).to(torch.int32)
    words = (eights << _shifts(bits, codes.device)).sum(-1, keepdim=True, dtype=torch.int32)
    return _reinterpret(words, torch.uint8)[..., :bits].flatten(-2)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Bytes, uint8 [..., m], to unsigned codes, uint8 [..., m*8/bits]: the inverse of `pack_bits`."""
    _check_width(bits, (2, 3, 4, 8))
    unit_bytes = _codes_per_unit(bits) * bits // 8
    if packed.dtype != torch.uint8 or packed.shape[-1] % unit_bytes:
        raise MismatchError(
            f"{bits}-bit packed codes must be uint8 in multiples of {unit_bytes} bytes, "
            f"not {packed.dtype} of shape {list(packed.shape)}."
        )
    if bits == 8:
        return packed
    if bits == 4:
        pairs = packed.to(torch.int16)
        return _reinterpret((pairs | (pairs << 4)) & 0x0F0F, torch.uint8)
    units = packed.reshape(*packed.shape[:-1], packed.shape[-1] // bits, bits)
    eights = _reinterpret(torch.nn.functional.pad(units, (0, 4 - bits)), torch.int32)
    codes = (eights >> _shifts(bits, packed.device)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Signed codes, int8 [rows, n], to int32 [rows, ceil(n*bits/32)]; the unused end of a row is 0."""
    _check_width(bits, (2, 3, 4, 8))
    offset = 1 << (bits - 1)
    if codes.dtype != torch.int8 or _out_of_range(codes, offset):
        raise MismatchError(f"{bits}-bit codes must be int8 in {-offset}..{offset - 1} to be packed.")
    unsigned = codes.view(torch.uint8) + offset  # wraps modulo 256, as negative codes require
    padding = -codes.shape[-1] % (32 // math.gcd(32, bits))
    if padding:
        unsigned = torch.nn.functional.pad(unsigned, (0, padding))
    words = _reinterpret(pack_bits(unsigned, bits), torch.int32)
    return words[..., : _num_words(codes.shape[-1], bits)].contiguous()


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` signed codes of each row: int32 [rows, ceil(count*bits/32)] to int8 [rows, count]."""
    _check_width(bits, (2, 3, 4, 8))
    num_words = _num_words(count, bits)
    if words.dtype != torch.int32 or words.shape[-1] != num_words:
        raise MismatchError(
            f"{count} codes of {bits} bits need {num_words} int32 words a row, "
            f"but the tensor is {words.dtype} of shape {list(words.shape)}."
        )
    if num_words % _words_per_unit(bits):
        words = torch.nn.functional.pad(words, (0, -num_words % _words_per_unit(bits)))
    unsigned = unpack_bits(_reinterpret(words, torch.uint8), bits)[..., :count]
    return (unsigned - (1 << (bits - 1))).view(torch.int8)


def _out_of_range(codes: Tensor, offset: int) -> bool:
    """Whether a code would overflow into its neighbours; 8-bit codes cannot, because they are int8."""
    return offset < 128 and codes.numel() > 0 and bool((codes.amin() < -offset) | (codes.amax() >= offset))


def _reinterpret(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as another integer type, the last dimension scaled to fit.

    A view if possible; flattening first avoids unusual strides of size-1 dimensions.
    """
    size = tensor.shape[-1] * tensor.element_size() // dtype.itemsize
    return tensor.reshape(-1).view(dtype).reshape(*tensor.shape[:-1], size)


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _words_per_unit(bits: int) -> int:
    """The smallest number of words that whole codes fill."""
    return bits // math.gcd(32, bits)


def _codes_per_unit(bits: int) -> int:
    """The smallest number of codes that fill whole bytes."""
    return {2: 8, 3: 8, 4: 2, 8: 1}[bits]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * bits, bits, dtype=torch.int32, device=device)


def _check_width(bits: int, known: tuple[int, ...]) -> None:
    if bits not in known:
        raise UnsupportedError(f"Codes of {bits} bits are not supported; the widths are {', '.join(map(str, known))}.")
