"""KV cache formats by name, and the exact bytes of each. The bit layouts are defined in `onebox.formats`.

A *vector* is the key or the value of one token in one KV head: `head_dim` values.

    name               bytes of a vector of head_dim values
    bf16               2 * head_dim bytes
    fp8                head_dim bytes (E4M3) and one fp16 scale
    turboquant_kXvY    head_dim * bits / 8 bytes (rotated, then a codebook of 2^bits) and one fp16 scale;
                       keys at X bits and values at Y bits, each of 8, 4, 3, 2; 8 is the fp8 codec
    turboquant         turboquant_k4v4

Stdlib only.
"""

import re
from dataclasses import dataclass, field

from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec

__all__ = ["PAGE_TOKENS", "KVFormat"]

PAGE_TOKENS = 64
"""Tokens in a KV page, in a chunk of the delta rule, and between two positions at which a prompt may be split. They are
equal so that a prefix that ends at such a position ends with a full page and a full chunk."""

SCALE_BYTES = 2
"""The fp16 scale stored with every packed vector."""

_PLAIN_BITS = 16
_PACKED_BITS = (8, 4, 3, 2)
_TURBOQUANT = re.compile(r"turboquant_k(\d)v(\d)")


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored. 16 bits: plain bf16 without a scale; 8, 4, 3 and 2 bits: one scale per vector."""

    name: str = field(compare=False)  # aliases compare equal
    key_bits: int
    value_bits: int

    @staticmethod
    def parse(name: str) -> "KVFormat":
        """The format selected by `--kv-cache-dtype`."""
        if name == "bf16":
            return KVFormat(name, _PLAIN_BITS, _PLAIN_BITS)
        if name == "fp8":
            return KVFormat(name, 8, 8)
        match = _TURBOQUANT.fullmatch("turboquant_k4v4" if name == "turboquant" else name)
        bits = tuple(int(digit) for digit in match.groups()) if match else ()
        if not bits or any(width not in _PACKED_BITS for width in bits):
            raise UsageError(
                f"--kv-cache-dtype {name!r} is not known; give bf16, fp8, turboquant, "
                "or turboquant_kXvY with X and Y of 8, 4, 3, 2."
            )
        return KVFormat(name, *bits)

    def key_bytes_per_vector(self, head_dim: int) -> int:
        return _vector_bytes(self.key_bits, head_dim)

    def value_bytes_per_vector(self, head_dim: int) -> int:
        return _vector_bytes(self.value_bits, head_dim)

    def bytes_per_token_layer(self, spec: ModelSpec) -> int:
        """Keys and values of one token in one full-attention layer, all KV heads."""
        vector_pair = self.key_bytes_per_vector(spec.head_dim) + self.value_bytes_per_vector(spec.head_dim)
        return spec.num_key_value_heads * vector_pair

    def bytes_per_token(self, spec: ModelSpec, *, with_mtp: bool) -> int:
        """Keys and values of one token in all layers with a KV cache; the MTP layer has its own."""
        layers = len(spec.full_layers) + (spec.mtp_num_hidden_layers if with_mtp else 0)
        return layers * self.bytes_per_token_layer(spec)


def _vector_bytes(bits: int, head_dim: int) -> int:
    if bits == _PLAIN_BITS:
        return 2 * head_dim
    return -(-head_dim * bits // 8) + SCALE_BYTES
