"""The sum of a linear's parts (partial sums), in Triton, for the kernel that reads them."""

import triton
import triton.language as tl

__all__ = ["sum_parts"]


@triton.jit
def sum_parts(parts_ptr, part_stride, at, inside, PARTS: tl.constexpr):
    """The sum over parts of the values at offset `at` in each, first to last, in float32."""
    total = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * part_stride + at, mask=inside, other=0.0).to(tl.float32)
    return total
