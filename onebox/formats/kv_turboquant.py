"""TurboQuant for keys and values: a vector is a scale and a rotated direction in 2, 3 or 4 bits per coordinate.

    codes  uint8 [..., d*bits/8]   │ lowest bits first, see bits.py │   head of 256: 64, 96 or 128 bytes
    scale  float16 [...]           │ lo hi │                                        + 2 bytes

    encode   y = H (signs * x / |x|) / sqrt(d);   code[i] = the level nearest y[i];   scale = |x| / |levels[codes]|
    decode   x = scale * signs * H levels[codes] / sqrt(d)

H is the Walsh-Hadamard matrix, H H = d, so H / sqrt(d) is its own inverse. `signs` is a fixed table of ±1 from integer
arithmetic, the levels come from `lloyd_max.py`: both are equal on all devices. D, the codebook error in units of |x|^2,
is .1167, .0343 and .0094 for d = 256 and 2, 3 and 4 bits. A plain centroid vector c is too short, |c|^2 = 1 - D; the
scale corrects its length, which removes the radial part of the error and leaves .120, .0344 and .0093. The encoder
divides by |c| once, so that the decoder, which runs for every token at every step, only multiplies.

All sums over a vector run as a fixed tree of element-wise additions, so a vector's bytes do not depend on its batch.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from onebox.formats.bits import pack_bits, unpack_bits
from onebox.formats.lloyd_max import lloyd_max_levels
from onebox.spec.errors import UnsupportedError

__all__ = [
    "decode_turboquant",
    "encode_turboquant",
    "hadamard",
    "rotate",
    "sign_table",
    "turboquant_levels",
    "unrotate",
]

SIGN_SEED = 0x6F6E65626F78  # "onebox"
SCALE_MAX = 65504.0


def encode_turboquant(x: Tensor, bits: int) -> dict[str, Tensor]:
    """Vectors [..., d], d a power of two from 8, to `codes` [..., d*bits/8] and `scale` [...].

    Scales above 65504 saturate; scales below 2**-25 become zero, and with them the vector.
    """
    _check_bits(bits)
    _check_dim(x.shape[-1])
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = wide / largest  # squares of bf16 values can overflow float32; these cannot
    length = _length(scaled).unsqueeze(-1)
    unit = scaled / length.clamp(min=torch.finfo(torch.float32).tiny)
    levels = turboquant_levels(x.shape[-1], bits, x.device)
    codes = torch.bucketize(rotate(unit), (levels[1:] + levels[:-1]) / 2, out_int32=True, right=True)
    scale = (length * largest).squeeze(-1) / _length(levels[codes])
    scale = scale.clamp(max=SCALE_MAX).to(torch.float16)
    return {"codes": pack_bits(codes.to(torch.uint8), bits), "scale": scale}


def decode_turboquant(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """float32 [..., d]; its length is that of the encoded vector, up to the scale's rounding."""
    _check_bits(bits)
    indices = unpack_bits(codes, bits)
    centroids = turboquant_levels(indices.shape[-1], bits, codes.device)[indices.to(torch.int32)]
    return unrotate(centroids) * scale.to(torch.float32).unsqueeze(-1)


def rotate(x: Tensor) -> Tensor:
    """float32 [..., d] times the signs, then the Hadamard transform; preserves lengths and inner products."""
    return hadamard(x * sign_table(x.shape[-1], x.device))


def unrotate(y: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return hadamard(y) * sign_table(y.shape[-1], y.device)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform (Sylvester order) of [..., d]: log2(d) layers of sums and differences."""
    dim = x.shape[-1]
    _check_dim(dim)
    half = 1
    while half < dim:
        left, right = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half).unbind(-2)
        x = torch.stack((left + right, left - right), dim=-2).flatten(-3)
        half *= 2
    return x * (1.0 / math.sqrt(dim))


def sign_table(dim: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 [d] of ±1: sign i is the top bit (1: minus) of the i-th splitmix64 output from SIGN_SEED."""
    return torch.tensor(_signs(dim), dtype=torch.float32, device=device)


def turboquant_levels(dim: int, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 [2**bits], ascending: the value of each code."""
    _check_dim(dim)
    return torch.tensor(lloyd_max_levels(dim, bits), dtype=torch.float32, device=device)


@lru_cache
def _signs(dim: int) -> tuple[float, ...]:
    return tuple(-1.0 if _splitmix64(i) >> 63 else 1.0 for i in range(dim))


def _splitmix64(index: int) -> int:
    """Output `index` of Steele, Lea and Flood's splitmix64 generator."""
    mask = 2**64 - 1
    z = (SIGN_SEED + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _length(x: Tensor) -> Tensor:
    """The length of float32 vectors [..., d], rounded to nearest on every device.

    torch's float32 square root on a CPU is off by one unit in the last place for one value in eight, which changes
    codes at a boundary; rounding a float64 square root gives the nearest float32.
    """
    return _tree_sum(x * x).to(torch.float64).sqrt().to(torch.float32)


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, whose size is a power of two, by adding halves."""
    while x.shape[-1] > 1:
        left, right = x.chunk(2, dim=-1)
        x = left + right
    return x.squeeze(-1)


def _check_dim(dim: int) -> None:
    if dim < 8 or dim & (dim - 1):
        raise UnsupportedError(f"TurboQuant rotates vectors of 8, 16, 32, ... coordinates, not {dim}.")


def _check_bits(bits: int) -> None:
    if bits not in (2, 3, 4):
        raise UnsupportedError(f"TurboQuant has 2, 3 or 4 bits per coordinate, not {bits}.")
