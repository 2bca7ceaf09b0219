"""The KV-cache formats by name: one codec for keys and one for values.

    name                 key codec      value codec      bytes per (token, head), d = 256:  key + value
    bf16                 bf16           bf16             512 + 512
    fp8                  fp8            fp8              258 + 258
    turboquant_kXvY      X bits         Y bits           2: 66   3: 98   4: 130   8 (the fp8 codec): 258
    turboquant           4 bits         4 bits           130 + 130

A codec encodes vectors [..., d] into named tensors with the same leading dimensions, and decodes them to float32.
The bytes of a vector depend on that vector alone. `kv_fp8.py` and `kv_turboquant.py` show the byte layouts.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebox.formats.kv_fp8 import decode_fp8, encode_fp8
from onebox.formats.kv_turboquant import decode_turboquant, encode_turboquant
from onebox.spec.errors import UnsupportedError

__all__ = ["Bf16Codec", "Fp8Codec", "KVCodec", "KVCodecs", "TurboQuantCodec", "kv_codecs"]


class KVCodec(Protocol):
    """How one vector of a key or a value is stored."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Vectors [..., d] to tensors [...] or [..., bytes]."""

    def decode(self, stored: dict[str, Tensor]) -> Tensor:
        """The output of `encode` to float32 [..., d]."""

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes of all encoded tensors for one vector of `dim` coordinates."""


@dataclass(frozen=True)
class Bf16Codec:
    """Plain bfloat16, the reference for the other formats."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"values": x.to(torch.bfloat16)}

    def decode(self, stored: dict[str, Tensor]) -> Tensor:
        return stored["values"].to(torch.float32)

    def bytes_per_vector(self, dim: int) -> int:
        return 2 * dim


@dataclass(frozen=True)
class Fp8Codec:
    """E4M3 codes and a float16 scale per vector."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return encode_fp8(x)

    def decode(self, stored: dict[str, Tensor]) -> Tensor:
        return decode_fp8(stored["codes"], stored["scale"])

    def bytes_per_vector(self, dim: int) -> int:
        return dim + 2


@dataclass(frozen=True)
class TurboQuantCodec:
    """Rotated Lloyd-Max codes of `bits` bits and a float16 scale per vector."""

    bits: int

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return encode_turboquant(x, self.bits)

    def decode(self, stored: dict[str, Tensor]) -> Tensor:
        return decode_turboquant(stored["codes"], stored["scale"], self.bits)

    def bytes_per_vector(self, dim: int) -> int:
        return dim * self.bits // 8 + 2


class KVCodecs(NamedTuple):
    """A cache format: one codec for keys and one for values."""

    name: str
    key: KVCodec
    value: KVCodec


def kv_codecs(name: str) -> KVCodecs:
    """The cache format called `name`: bf16, fp8, turboquant, or turboquant_kXvY with X and Y of 2, 3, 4, 8."""
    if name == "bf16":
        return KVCodecs(name, Bf16Codec(), Bf16Codec())
    if name == "fp8":
        return KVCodecs(name, Fp8Codec(), Fp8Codec())
    widths = re.fullmatch(r"turboquant_k([2348])v([2348])", "turboquant_k4v4" if name == "turboquant" else name)
    if widths is None:
        raise UnsupportedError(
            f"KV-cache format {name!r} is unknown; choose bf16, fp8, turboquant, or turboquant_kXvY, X, Y of 2 3 4 8."
        )
    key, value = (_codec_of_width(int(width)) for width in widths.groups())
    return KVCodecs(widths.string, key, value)


def _codec_of_width(bits: int) -> KVCodec:
    return Fp8Codec() if bits == 8 else TurboQuantCodec(bits)
