"""Arithmetic for the twins with bits that do not depend on a number's place in its tensor or on neighbouring numbers.

On a CPU torch rounds `sigmoid`, `silu` and `softplus` differently in a tensor's last few elements, which use scalar
instructions, than in the others; `exp`, `log` and the four operations are the same everywhere. A matrix product may sum
in an order that depends on its number of rows, so rows are padded to a multiple of four, and where that is not enough,
four are multiplied at a time. The order also depends on how the second matrix is stored, so it is always read row by
row: for a transposed view MKL has other code for few rows on some processors. In bfloat16, where oneDNN multiplies, it
depends on the length of K.
"""

from collections.abc import Iterable
from functools import cache, lru_cache, reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "BLOCK",
    "FEW",
    "add_in_order",
    "any_multiple_is_alike",
    "filled",
    "pair_sum",
    "product",
    "sigmoid",
    "silu",
    "softplus",
]

FEW = 4
"""Products with a multiple of this number of rows sum in one order on the BLAS of x86 machines."""
BLOCK = 1024
"""The longest K that oneDNN sums in one order for any number of rows."""
_LEAST_COLUMNS = 16
"""With fewer columns, the order of a product's sums may depend on the row's place."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, N]: x [R, K] times the transpose of weight [N, K], which is copied unless it is contiguous.

    float32, summed in float32; or, if weight and x are bfloat16, bfloat16, summed in float32 and rounded once per BLOCK
    of K.
    """
    if weight.dtype is torch.bfloat16 and x.dtype is torch.bfloat16:
        return _narrow_product(x, weight)
    rows, columns = x.shape[0], weight.shape[0]
    padded = filled(x if x.dtype is torch.float32 else x.to(torch.float32))
    if columns < _LEAST_COLUMNS:
        weight = pad(weight, (0, 0, 0, _LEAST_COLUMNS - columns))
    turned = weight.T.contiguous().to(torch.float32)
    if any_multiple_is_alike():
        found = torch.mm(padded, turned)
    else:
        found = torch.cat([torch.mm(some, turned) for some in torch.split(padded, FEW)])
    return found if found.shape == (rows, columns) else found[:rows, :columns]


def _narrow_product(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[1] <= BLOCK:
        return torch.mm(x, weight.T)
    total = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for some, part in zip(torch.split(x, BLOCK, dim=1), torch.split(weight, BLOCK, dim=1), strict=True):
        total += torch.mm(some, part.T)
    return total.to(x.dtype)


def filled(x: Tensor) -> Tensor:
    """X [R, K] padded with rows of zeros to a multiple of FEW, contiguous."""
    missing = -x.shape[0] % FEW
    return torch.cat([x, _zeros(missing, x.shape[1], x.dtype)]) if missing else x.contiguous()


@lru_cache(maxsize=64)
def _zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


@cache
def any_multiple_is_alike() -> bool:
    """Whether this machine's product gives a row the same bits in any multiple of FEW rows, alone or in a batch."""
    draw = torch.Generator().manual_seed(0)
    for columns, inner in ((80, 96), (64, 1024), (272, 256), (1552, 192)):
        x, turned = torch.randn(32, inner, generator=draw), torch.randn(inner, columns, generator=draw)
        tiles = torch.cat([torch.mm(some, turned) for some in torch.split(x, FEW)])
        if not all(torch.equal(torch.mm(x[:count], turned), tiles[:count]) for count in range(FEW, 33, FEW)):
            return False
        batch = torch.bmm(x.expand(3, -1, -1), turned.expand(3, -1, -1).contiguous())
        if not torch.equal(batch, tiles.expand(3, -1, -1)):
            return False
    return True


def sigmoid(x: Tensor) -> Tensor:
    """float32."""
    return x.to(torch.float32).neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """The product of x and its sigmoid, float32."""
    wide = x.to(torch.float32)
    return wide / wide.neg().exp_().add_(1)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), float64: for small exp(x) its error is 2^-53, and later operations round to float32."""
    wide = x.to(torch.float64)
    return wide.clamp(min=0) + wide.abs().neg_().exp_().add_(1).log_()


def add_in_order(parts: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor, first to last."""
    return reduce(torch.add, parts)


def pair_sum(x: Tensor) -> Tensor:
    """The sum over dimension 1 of [S, n, ...] as a tree, neighbours first: trailing zeros do not change its bits."""
    while x.shape[1] > 1:
        even = x.shape[1] // 2 * 2
        sums = x[:, 0:even:2] + x[:, 1:even:2]
        x = sums if even == x.shape[1] else torch.cat([sums, x[:, even:]], dim=1)
    return x.squeeze(1)
