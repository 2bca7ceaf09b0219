"""A matrix of weights on a CPU, laid out once for products with any number of rows.

oneDNN reorders a matrix into the blocks its inner loops read, so a product of a few rows reads it once and copies
nothing; MKL, which torch takes for float32, copies it at every call. As long as K fits into one of oneDNN's blocks it
also sums a row in one order however many rows there are, which is what a row's bits need: a longer K is cut. A small
matrix stays as it is, because calling oneDNN costs more than MKL's copy; so does every matrix where oneDNN is absent or
does not keep the order (`_keeps_the_order` tries it).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from onebox.kernels.invariant import BLOCK, product

__all__ = ["Packed"]

_SMALL = 1 << 15
"""Numbers in a float32 matrix up to which MKL's copy costs less than oneDNN's call."""


@dataclass(frozen=True)
class Packed:
    """W [N, K], float32 or bfloat16: one plain matrix whose transpose is contiguous, or oneDNN's form of cuts of K."""

    plain: Tensor | None
    cuts: tuple[Tensor, ...]
    ends: tuple[int, ...]
    """Where each cut ends in K."""

    @classmethod
    def of(cls, weight: Tensor) -> "Packed":
        is_small = weight.dtype is torch.float32 and weight.numel() < _SMALL
        if is_small or not _keeps_the_order(weight.dtype):
            return cls(weight.T.contiguous().T, (), ())
        return cls(None, *_cut(weight))

    def __call__(self, x: Tensor) -> Tensor:
        """The product [R, N] of x [R, K] and W transposed, in their dtype."""
        if self.plain is not None:
            return product(x, self.plain)
        if len(self.cuts) == 1:
            return _multiply(x, self.cuts[0])
        total, begin = None, 0
        for cut, end in zip(self.cuts, self.ends, strict=True):
            part = _multiply(x[:, begin:end], cut).to(torch.float32)
            total, begin = part if total is None else total.add_(part), end
        return x.new_zeros(len(x), 0) if total is None else total.to(x.dtype)


def _cut(weight: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    inner = weight.shape[1]
    ends = tuple(min(begin + BLOCK, inner) for begin in range(0, inner, BLOCK))
    begins = (0, *ends[:-1])
    return tuple(_reorder(weight[:, begin:end]) for begin, end in zip(begins, ends, strict=True)), ends


def _reorder(weight: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())
    return reordered


def _multiply(x: Tensor, reordered: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, reordered, None, "none", [], "")
    return out


@cache
def _keeps_the_order(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and gives a row the same bits among any number of rows."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    draw = torch.Generator().manual_seed(0)
    for columns, inner in ((80, 96), (1552, 256), (272, BLOCK)):
        x = torch.randn(64, inner, generator=draw).to(dtype)
        reordered = _reorder(torch.randn(columns, inner, generator=draw).to(dtype))
        alone = torch.cat([_multiply(row, reordered) for row in torch.split(x, 1)])
        counts = (2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 48, 64)
        if not all(torch.equal(_multiply(x[:count], reordered), alone[:count]) for count in counts):
            return False
    return True
