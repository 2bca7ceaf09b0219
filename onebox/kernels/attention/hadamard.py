"""TurboQuant's rotation in Triton: signs, then a Walsh-Hadamard transform over a head's D coordinates.

It preserves inner products and is linear: the query is rotated once, values are summed in the rotated space and the
result is rotated back once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.formats.kv_pages import FP8_BITS, KVPages, turboquant_tables
from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.tuning import Tunable

__all__ = ["hadamard", "partner_in_pair", "rotate", "rotated_query", "rotation_constants", "rotation_signs"]

_ROTATE = Tunable("attention_rotate")


@triton.jit
def partner_in_pair(x, BIT: tl.constexpr, D: tl.constexpr):
    """Element i of float32 [D] becomes element i ^ (1 << BIT)."""
    pairs = tl.reshape(x, [D >> (BIT + 1), 2, 1 << BIT])
    other = tl.broadcast_to((1 - tl.arange(0, 2))[None, :, None], [D >> (BIT + 1), 2, 1 << BIT])
    return tl.reshape(tl.gather(pairs, other, 1), [D])


@triton.jit
def hadamard(x, D: tl.constexpr, LOG_D: tl.constexpr, INVERSE_ROOT: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of float32 [D]: the additions of `onebox.formats.hadamard`, in its order."""
    index = tl.arange(0, D)
    for layer in tl.static_range(LOG_D):
        partner = partner_in_pair(x, layer, D)
        x = tl.where((index & (1 << layer)) == 0, x + partner, partner - x)
    return x * INVERSE_ROOT


@triton.jit
def paged_attention_rotate_kernel(
    x_ptr,  # [rows, D]
    out_ptr,  # [rows, D]
    signs_ptr,  # float32 [D]
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INVERSE_ROOT: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    columns = tl.arange(0, D)
    at = tl.program_id(0).to(tl.int64) * D + columns
    signs = tl.load(signs_ptr + columns)
    wait(DEPENDENT)
    x = tl.load(x_ptr + at).to(tl.float32)
    x = hadamard(x if IS_INVERSE else x * signs, D, LOG_D, INVERSE_ROOT)
    x = x * signs if IS_INVERSE else x
    tl.store(out_ptr + at, rounded(x, out_ptr.dtype.element_ty))


def rotation_signs(bits: int, dim: int, device: torch.device) -> Tensor | None:
    """The signs of the rotation, or None if the codec of `bits` does not rotate."""
    return turboquant_tables(dim, bits, device).signs if bits < FP8_BITS else None


def rotated_query(query: Tensor, pages: KVPages) -> Tensor:
    """The query as the kernels read it: Hadamard-rotated if the keys are, and then float16 instead of bfloat16."""
    signs = rotation_signs(pages.format.key_bits, query.shape[-1], query.device)
    if signs is None:
        return query.contiguous()
    dtype = torch.float16 if query.dtype == torch.bfloat16 else query.dtype
    rotated = torch.empty_like(query, dtype=dtype, memory_format=torch.contiguous_format)
    rotate(query.contiguous(), rotated, signs, is_inverse=False)
    return rotated


def rotate(x: Tensor, out: Tensor, signs: Tensor, *, is_inverse: bool) -> None:
    rows, dim = x.shape[0] * x.shape[1], x.shape[2]
    launch = {"IS_INVERSE": is_inverse, "num_warps": 1, **launch_options(_ROTATE, x.shape[-2])}
    paged_attention_rotate_kernel[(rows,)](x, out, signs, **rotation_constants(dim), **launch)


def rotation_constants(dim: int) -> dict[str, float]:
    return {"D": dim, "LOG_D": dim.bit_length() - 1, "INVERSE_ROOT": dim**-0.5}
