"""Arithmetic shared by several kernels, in Triton: rounding, activations, dots of bfloat16 operands."""

import triton
import triton.language as tl

__all__ = [
    "IS_INTERPRETED",
    "dot",
    "dot_bf16",
    "dot_split",
    "loop_bound",
    "ordered_bits",
    "rounded",
    "stable_sigmoid",
    "swiglu",
]

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels: no inline assembly, and dots multiply the raw bits of bfloat16."""


@triton.jit
def loop_bound(x):
    """An integer as a loop bound. The interpreter's scalars are one-element arrays, which numpy rejects as a bound."""
    if IS_INTERPRETED:
        return x.handle.data.item()
    else:
        return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE, nearest even. The interpreter truncates to bfloat16: there bits are rounded first."""
    if IS_INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def ordered_bits(bits):
    """Maps the bits of float32 numbers to int32 in the same order as the numbers; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def stable_sigmoid(x):
    """The sigmoid from exp(-|x|), which never overflows; `tl.sigmoid` differs from it in the last place."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit
def swiglu(gate, up):
    """SiLU(gate) * up, with `stable_sigmoid`."""
    return gate * stable_sigmoid(gate) * up


@triton.jit
def dot(a, b, total):
    """The product a @ b + total in float32. The interpreter cannot multiply bfloat16 itself."""
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def dot_bf16(a, b, total):
    """The sum total + a @ b of bfloat16 operands: exact products, float32 sums."""
    if IS_INTERPRETED:
        # The order of sums in numpy's matrix product depends on the number of columns; this sum has one order.
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        result = total + tl.sum(products, 1)
    else:
        result = tl.dot(a, b, total)
    return result


@triton.jit
def dot_split(weight, x, total):
    """The sum total + weight @ x: weight bfloat16 [BLOCK_N, BLOCK_K], x [BLOCK_K, BLOCK_R] bfloat16 or float32.

    A float32 number is split into three bfloat16 terms. Each rounding leaves a remainder that is exact in float32, the
    second one with 8 bits, so the third term is exact; the smallest term is added first. (An infinite x gives NaN.)
    """
    if x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = dot_bf16(weight, low, total)
        total = dot_bf16(weight, middle, total)
        total = dot_bf16(weight, high, total)
    else:
        total = dot_bf16(weight, x, total)
    return total
