"""FP8 for keys and values: each (token, head) vector has its own scale.

    codes  float8_e4m3fn [..., d]     │ c0 c1 ... c(d-1) │   d bytes
    scale  float16 [...]              │ lo hi │              2 bytes          head of 256: 258 bytes (bf16: 512)

    x[i] = codes[i] * scale

scale = absmax / 448 rounded to float16 and clamped to its normal numbers, 2**-14 .. 65504: FP8's own range is wide
enough for smaller vectors, and no device need support subnormal float16. Larger vectors saturate. A zero vector stays
zero; NaN stays NaN, because a cache write cannot raise an error.
Every operation is per vector, so a vector's bytes do not depend on its batch.
"""

import torch
from torch import Tensor

from onebox.formats.fp8 import E4M3_MAX

__all__ = ["decode_fp8", "encode_fp8"]

SMALLEST_SCALE = 2.0**-14
LARGEST_SCALE = 65504.0


def encode_fp8(x: Tensor) -> dict[str, Tensor]:
    """Vectors [..., d] of any float dtype to `codes` [..., d] and `scale` [...]."""
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(-1) / E4M3_MAX).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float16)
    scaled = wide / scale.to(torch.float32).unsqueeze(-1)
    return {"codes": scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), "scale": scale}


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., d]."""
    return codes.to(torch.float32) * scale.to(torch.float32).unsqueeze(-1)
