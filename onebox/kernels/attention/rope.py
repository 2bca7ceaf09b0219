"""Rotary embedding in Triton: the table once per step, then one warp per row and head, plain and fused."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels.common.arithmetic import rounded
from onebox.kernels.common.dependent import launch_options, release, wait
from onebox.kernels.common.launch import next_power_of_2
from onebox.kernels.common.parts import sum_parts
from onebox.kernels.common.tuning import Tunable

__all__ = [
    "fused_heads",
    "load_norm",
    "load_rotation",
    "partner_of",
    "qk_norm_rope",
    "qk_norm_rope_fused",
    "rotary_table",
    "turned",
]

_ROPE_FUSED = Tunable("qk_norm_rope_fused")


# Not specialised: the number of rows, which decides the stride and the alignment, must not compile it anew.
@triton.jit(do_not_specialize=["positions_ptr", "axis_stride"])
def rotary_table_kernel(
    positions_ptr,  # integers [3, R], strides axis_stride and row_stride
    frequencies_ptr,  # float32 [F]
    cos_ptr,  # float32 [R, F]
    sin_ptr,  # float32 [R, F]
    axis_stride,
    row_stride,
    height_end,  # three times the height's section: its frequencies are below this index
    width_end,  # the same for the width
    scale,  # float32, of cosines and sines
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK)
    inside = pairs < F
    is_height = (pairs % 3 == 1) & (pairs < height_end)
    is_width = (pairs % 3 == 2) & (pairs < width_end)
    axis = tl.where(is_height, 1, tl.where(is_width, 2, 0))
    position = tl.load(positions_ptr + axis * axis_stride + row * row_stride, mask=inside, other=0)
    angle = position.to(tl.float32) * tl.load(frequencies_ptr + pairs, mask=inside, other=0.0)
    # float64 has an exact range reduction at a million turns, and rounds to the twin's float32 bits on every device.
    wide = angle.to(tl.float64)
    tl.store(cos_ptr + row * F + pairs, tl.cos(wide).to(tl.float32) * scale, mask=inside)
    tl.store(sin_ptr + row * F + pairs, tl.sin(wide).to(tl.float32) * scale, mask=inside)


@triton.jit
def partner_of(columns, HALF: tl.constexpr):
    """The column that each column is rotated with: HALF after it or HALF before it."""
    return tl.where(columns < HALF, columns + HALF, columns - HALF)


@triton.jit
def load_rotation(cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(cos, sin) float32 [BLOCK] of a row's [HALF], for each column of a head; (1, 0) for columns without rotation."""
    columns = tl.arange(0, BLOCK)
    pairs = tl.where(columns < HALF, columns, columns - HALF)
    cos = tl.load(cos_ptr + pairs, mask=columns < 2 * HALF, other=1.0)
    sin = tl.load(sin_ptr + pairs, mask=columns < 2 * HALF, other=0.0)
    return cos, sin


@triton.jit
def load_norm(weight_ptr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(norm weight of each column, norm weight of its partner), float32 [BLOCK]."""
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    partner = tl.load(weight_ptr + partner_of(columns, HALF), mask=columns < 2 * HALF, other=0.0).to(tl.float32)
    return weight, partner


@triton.jit
def turned(
    x,  # float32 [BLOCK]: one head, zeros beyond D
    partner,  # float32 [BLOCK]: the partner of each rotated column
    weight,  # this and the next from `load_norm`
    partner_weight,
    cos,  # this and the next from `load_rotation`
    sin,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """float32 [BLOCK]: the head normed and rotated."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    x = x * scale * (1 + weight)
    partner = partner * scale * (1 + partner_weight)
    return x * cos + tl.where(tl.arange(0, BLOCK) < HALF, -partner, partner) * sin


@triton.jit
def _norm_and_rotate(
    x_ptr,  # [D]: one head
    weight_ptr,  # [D]
    cos_ptr,  # float32 [HALF]: of this row
    sin_ptr,  # float32 [HALF]
    out_ptr,  # [D]
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    # The partner of element i is loaded a second time (from L1), which avoids an exchange between lanes.
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + partner_of(columns, HALF), mask=columns < 2 * HALF, other=0.0).to(tl.float32)
    weight, partner_weight = load_norm(weight_ptr, D, HALF, BLOCK)
    cos, sin = load_rotation(cos_ptr, sin_ptr, HALF, BLOCK)
    out = turned(x, partner, weight, partner_weight, cos, sin, eps, D, HALF, BLOCK)
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    q_gate_ptr,  # [R, Q, 2, D], row stride q_stride
    k_ptr,  # [R, KV, D], row stride k_stride
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_ptr,  # float32 [R, HALF]
    sin_ptr,  # float32 [R, HALF]
    query_ptr,  # [R, Q, D]
    gate_ptr,  # [R, Q, D]
    key_ptr,  # [R, KV, D]
    q_stride,
    k_stride,
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # the Q query heads, then the KV key heads
    cos_ptr += row * HALF
    sin_ptr += row * HALF
    if head < Q:
        in_ptr = q_gate_ptr + row * q_stride + head * 2 * D
        out = (row * Q + head) * D
        _norm_and_rotate(in_ptr, q_weight_ptr, cos_ptr, sin_ptr, query_ptr + out, eps, D, HALF, BLOCK)
        columns = tl.arange(0, BLOCK)
        gate = tl.load(in_ptr + D + columns, mask=columns < D, other=0.0)
        tl.store(gate_ptr + out + columns, gate, mask=columns < D)
    else:
        in_ptr = k_ptr + row * k_stride + (head - Q) * D
        out = (row * KV + head - Q) * D
        _norm_and_rotate(in_ptr, k_weight_ptr, cos_ptr, sin_ptr, key_ptr + out, eps, D, HALF, BLOCK)


def rotary_table(positions, frequencies, mrope_section, scale):
    rows, num_pairs = positions.shape[1], frequencies.shape[0]
    cos, sin = torch.empty(2, rows, num_pairs, dtype=torch.float32, device=positions.device)
    if rows:
        rotary_table_kernel[(rows,)](
            positions,
            frequencies,
            cos,
            sin,
            positions.stride(0),
            positions.stride(1),
            3 * mrope_section[1],
            3 * mrope_section[2],
            scale,
            F=num_pairs,
            BLOCK=next_power_of_2(num_pairs),
            num_warps=1,
        )
    return cos, sin


def qk_norm_rope(q_gate, k, q_weight, k_weight, cos, sin, eps):
    rows, head_dim = q_gate.shape[0], q_weight.shape[0]
    num_heads, num_kv_heads = q_gate.shape[1] // (2 * head_dim), k.shape[1] // head_dim
    query = q_gate.new_empty(rows, num_heads, head_dim)
    gate = q_gate.new_empty(rows, num_heads, head_dim)
    key = k.new_empty(rows, num_kv_heads, head_dim)
    if rows:
        qk_norm_rope_kernel[(rows, num_heads + num_kv_heads)](
            q_gate,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            query,
            gate,
            key,
            q_gate.stride(0),
            k.stride(0),
            eps,
            Q=num_heads,
            KV=num_kv_heads,
            D=head_dim,
            HALF=cos.shape[1],
            BLOCK=next_power_of_2(head_dim),
            num_warps=1,
        )
    return query, gate, key


@triton.jit(do_not_specialize=["slots_ptr"])
def qk_norm_rope_fused_kernel(
    qkv_ptr,  # float32 [PARTS, R, (2 Q + 2 KV) D]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_ptr,  # float32 [R, HALF]
    sin_ptr,  # float32 [R, HALF]
    query_ptr,  # [R, Q, D]
    key_ptr,  # [R, KV, D], or uncoded pages [pages, KV, P, D]; so is the next
    value_ptr,
    slots_ptr,  # int64 [R]: slots of keys and values in the pages, negative to skip; None without pages
    eps,
    part_stride,
    row_stride,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, head): the Q queries, the KV keys, the KV values."""
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    # Masks, not branches, select the kind of head, and late: a branch would cost a memory round trip of its own.
    q_weight, q_partner_weight = load_norm(q_weight_ptr, D, HALF, BLOCK)
    k_weight, k_partner_weight = load_norm(k_weight_ptr, D, HALF, BLOCK)
    kv_head = tl.where(head < Q + KV, head - Q, head - Q - KV)
    vector = row * KV + kv_head
    is_kept = head >= Q
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)  # an input of the step
        vector = ((slot // P) * KV + kv_head) * P + slot % P
        is_kept = is_kept & (slot >= 0)
    wait(DEPENDENT)
    # Each query is followed by its gate; keys and values come after all of them.
    start = row * row_stride + tl.where(head < Q, head * 2 * D, (head + Q) * D)
    is_turned = (columns < 2 * HALF) & (head < Q + KV)
    cos, sin = load_rotation(cos_ptr + row * HALF, sin_ptr + row * HALF, HALF, BLOCK)
    x = sum_parts(qkv_ptr, part_stride, start + columns, inside, PARTS)
    partner = sum_parts(qkv_ptr, part_stride, start + partner_of(columns, HALF), is_turned, PARTS)
    weight = tl.where(head < Q, q_weight, k_weight)
    partner_weight = tl.where(head < Q, q_partner_weight, k_partner_weight)
    out = turned(x, partner, weight, partner_weight, cos, sin, eps, D, HALF, BLOCK)
    at = query_ptr + (row * Q + head) * D + columns
    tl.store(at, rounded(out, query_ptr.dtype.element_ty), mask=inside & (head < Q))
    is_key = is_kept & (head < Q + KV)
    tl.store(key_ptr + vector * D + columns, rounded(out, key_ptr.dtype.element_ty), mask=inside & is_key)
    is_value = is_kept & (head >= Q + KV)
    tl.store(value_ptr + vector * D + columns, rounded(x, value_ptr.dtype.element_ty), mask=inside & is_value)


def qk_norm_rope_fused(qkv_parts, q_weight, k_weight, cos, sin, eps, num_kv_heads, dtype):
    key = torch.empty((qkv_parts.shape[1], num_kv_heads, len(q_weight)), dtype=dtype, device=qkv_parts.device)
    value = torch.empty_like(key)
    query = fused_heads(qkv_parts, (q_weight, k_weight, cos, sin), eps, dtype, (key, value, None), num_kv_heads, 1)
    return query, key, value


def fused_heads(
    qkv_parts: Tensor,
    turning: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    dtype: torch.dtype,
    places: tuple[Tensor, Tensor, Tensor | None],
    num_kv_heads: int,
    page_tokens: int,
) -> Tensor:
    """The queries; keys and values are written to `places`: two tensors, and the slots in them if they are pages."""
    num_parts, rows, width = qkv_parts.shape
    head_dim = len(turning[0])
    num_heads = (width // head_dim - 2 * num_kv_heads) // 2
    query = torch.empty((rows, num_heads, head_dim), dtype=dtype, device=qkv_parts.device)
    if rows:
        qk_norm_rope_fused_kernel[(rows, num_heads + 2 * num_kv_heads)](
            qkv_parts,
            *turning,
            query,
            *places,
            eps,
            qkv_parts.stride(0),
            qkv_parts.stride(1),
            Q=num_heads,
            KV=num_kv_heads,
            D=head_dim,
            HALF=turning[2].shape[1],
            BLOCK=next_power_of_2(head_dim),
            PARTS=num_parts,
            P=page_tokens,
            num_warps=1,
            maxnreg=168,  # without a limit the compiler saves registers by delaying loads
            **launch_options(_ROPE_FUSED, num_heads),
        )
    return query
