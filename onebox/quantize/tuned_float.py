"""Float matrices whose rounding is tuned: E4M3 in blocks.

A weight over its scale lies between two codes, whose distance grows with it. In units of that distance an offset in
-0.5..0.5 is added before it is rounded, as for integers. Scales are those of rounding to nearest: the relative error of
a float does not depend on them.
"""

import torch
from torch import Tensor

from onebox.formats import dequantize_fp8_block, quantize_fp8_block
from onebox.spec.weights import FP8_BLOCK

__all__ = ["TunedFp8"]

_SCALE_DTYPE = torch.bfloat16
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_MANTISSA_BITS = 3
_SMALLEST = 2.0**-9
"""The smallest E4M3 number above zero, and the distance of codes below 2 ** -6."""


class TunedFp8:
    """A weight, float32 [out, in], whose rounding to E4M3 with a scale for each block is tuned."""

    factors: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        _, self._scales = quantize_fp8_block(weight, FP8_BLOCK, _SCALE_DTYPE)
        ones = torch.ones_like(weight, dtype=torch.float8_e4m3fn)
        self._scale = dequantize_fp8_block(ones, self._scales, FP8_BLOCK)
        values = (weight / self._scale).clamp_(-_LARGEST, _LARGEST)
        self._distance = code_distance(values)
        self._places = values / self._distance
        self.offsets = torch.zeros_like(weight, requires_grad=True)

    def weight(self) -> Tensor:
        """The rounded weight, float32 [out, in], through which gradients reach the offsets."""
        return self._values() * self._scale

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight as it is rounded now, by suffix, on the CPU."""
        with torch.no_grad():
            codes = self._values().to(torch.float8_e4m3fn)
        return {"weight": codes.cpu(), "weight_scale": self._scales.cpu()}

    def _values(self) -> Tensor:
        place = self._places + self.offsets
        rounded = place + (place.round() - place).detach()
        # Rounded up past a power of two it is a code of the next distance; only beyond the last code there is none.
        return (rounded * self._distance).clamp(-_LARGEST, _LARGEST)


def code_distance(values: Tensor) -> Tensor:
    """How far apart E4M3 codes are at each of these values: a power of two."""
    exponent = torch.frexp(values.abs().clamp_(min=_SMALLEST)).exponent - 1
    return torch.ldexp(torch.ones_like(values), exponent - _MANTISSA_BITS).clamp_(min=_SMALLEST)
