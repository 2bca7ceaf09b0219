"""The KV cache of one attention layer in pages, keys and values each in their own codec (`kv.py`).

    bits   codes                                    scale
    16     bfloat16 [pages, V, P, D]                none
     8     uint8    [pages, V, P, D]                float16 [pages, V, P]     E4M3 codes, see kv_fp8.py
     4..2  uint8    [pages, V, P, D*bits/8]         float16 [pages, V, P]     indices,    see kv_turboquant.py

    page ── KV head 0 ── token 0   │ the codes of one vector │      slot = page * P + offset identifies a token;
         │            ── token 1   │ the codes of one vector │      a sequence's page table lists its pages in order
         │            ── ...
         └─ KV head 1 ── ...

The tokens of one head in a page are contiguous, so attention reads a page's keys as one range of bytes. Scales are in a
separate tensor, so that codes stay aligned. A token takes the bytes of `onebox.spec.kv.KVFormat`, without padding.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.formats.kv_fp8 import decode_fp8, encode_fp8
from onebox.formats.kv_turboquant import decode_turboquant, encode_turboquant, sign_table, turboquant_levels
from onebox.spec.errors import MismatchError
from onebox.spec.kv import KVFormat

__all__ = [
    "FP8_BITS",
    "PAGE_MULTIPLE",
    "PLAIN_BITS",
    "KVPages",
    "TurboQuantTables",
    "allocate",
    "decode_codes",
    "read_tokens",
    "turboquant_tables",
    "write_tokens",
]

PAGE_MULTIPLE = 32
"""Attention reads this many tokens at a time, which must be in one page."""
PLAIN_BITS = 16
FP8_BITS = 8


class KVPages(NamedTuple):
    """A pool of pages; the module's docstring shows the layout. Writes change the tensors in place."""

    format: KVFormat
    key_codes: Tensor
    key_scale: Tensor | None
    value_codes: Tensor
    value_scale: Tensor | None

    @property
    def page_tokens(self) -> int:
        return self.key_codes.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.key_codes.shape[1]

    def to(self, device: torch.device) -> "KVPages":
        """A copy on another device."""
        key_scale = None if self.key_scale is None else self.key_scale.to(device)
        value_scale = None if self.value_scale is None else self.value_scale.to(device)
        return KVPages(self.format, self.key_codes.to(device), key_scale, self.value_codes.to(device), value_scale)

    @property
    def total_bytes(self) -> int:
        tensors = (self.key_codes, self.key_scale, self.value_codes, self.value_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


class TurboQuantTables(NamedTuple):
    """The codec's tables on a device, for kernels, float32: signs [D], levels [2**bits], their midpoints."""

    signs: Tensor
    levels: Tensor
    boundaries: Tensor


def allocate(
    kv_format: KVFormat, num_pages: int, page_tokens: int, kv_heads: int, head_dim: int, device: torch.device
) -> KVPages:
    """Pages of zeros, in the layout of the module's docstring."""
    if page_tokens % PAGE_MULTIPLE:
        raise MismatchError(f"A KV page holds a multiple of {PAGE_MULTIPLE} tokens, not {page_tokens}.")
    shape = (num_pages, kv_heads, page_tokens)
    key_codes, key_scale = _side(kv_format.key_bits, shape, head_dim, device)
    value_codes, value_scale = _side(kv_format.value_bits, shape, head_dim, device)
    return KVPages(kv_format, key_codes, key_scale, value_codes, value_scale)


def write_tokens(pages: KVPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Encodes key and value [R, V, D] into the tokens at slots, int64 [R]; negative slots are skipped."""
    kept = slots >= 0
    page, offset = slots[kept] // pages.page_tokens, slots[kept] % pages.page_tokens
    for x, bits, codes, scale in (
        (key, pages.format.key_bits, pages.key_codes, pages.key_scale),
        (value, pages.format.value_bits, pages.value_codes, pages.value_scale),
    ):
        new_codes, new_scale = _encode(bits, x[kept])
        codes[page, :, offset] = new_codes
        if scale is not None and new_scale is not None:
            scale[page, :, offset] = new_scale


def read_tokens(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded keys and values, float32 [N, V, D], of the tokens at slots, int64 [N]."""
    page, offset = slots // pages.page_tokens, slots % pages.page_tokens

    def decoded(bits: int, codes: Tensor, scale: Tensor | None) -> Tensor:
        return decode_codes(bits, codes[page, :, offset], None if scale is None else scale[page, :, offset])

    key = decoded(pages.format.key_bits, pages.key_codes, pages.key_scale)
    return key, decoded(pages.format.value_bits, pages.value_codes, pages.value_scale)


def decode_codes(bits: int, codes: Tensor, scale: Tensor | None) -> Tensor:
    """Decoded vectors, float32 [..., D], of codes and scale [...] as a pool stores them in `bits`."""
    if scale is None:
        return codes.to(torch.float32)
    if bits == FP8_BITS:
        return decode_fp8(codes.view(torch.float8_e4m3fn), scale)
    return decode_turboquant(codes, scale, bits)


@lru_cache
def turboquant_tables(dim: int, bits: int, device: torch.device) -> TurboQuantTables:
    """The tables on a device, created once and cached: a captured graph must not copy them from the host."""
    levels = turboquant_levels(dim, bits)
    boundaries = (levels[1:] + levels[:-1]) / 2
    return TurboQuantTables(sign_table(dim, device), levels.to(device), boundaries.to(device))


def _side(bits: int, shape: tuple[int, int, int], head_dim: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    if bits == PLAIN_BITS:
        return torch.zeros(*shape, head_dim, dtype=torch.bfloat16, device=device), None
    codes = torch.zeros(*shape, head_dim * bits // 8, dtype=torch.uint8, device=device)
    return codes, torch.zeros(shape, dtype=torch.float16, device=device)


def _encode(bits: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if bits == PLAIN_BITS:
        return x.to(torch.bfloat16), None
    if bits == FP8_BITS:
        stored = encode_fp8(x)
        return stored["codes"].view(torch.uint8), stored["scale"]
    stored = encode_turboquant(x, bits)
    return stored["codes"], stored["scale"]
