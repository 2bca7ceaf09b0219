"""The rotation in Triton: its table once a step, then one warp for each head of a row in every attention layer."""

import torch
import triton
import triton.language as tl

__all__ = ["load_norm", "load_rotation", "partner_of", "qk_norm_rope", "rotary_table", "turned"]


@triton.jit
def rotary_table_kernel(
    positions_ptr,  # integers [3, R], elements axis_stride and row_stride apart
    frequencies_ptr,  # float32 [F]
    cos_ptr,  # float32 [R, F]
    sin_ptr,  # float32 [R, F]
    axis_stride,
    row_stride,
    height_end,  # three times the height's section: where its frequencies end
    width_end,  # the same of the width
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
    # Float64 has an exact range reduction at 262,144 turns, and rounds to the twin's float32 bits on every device.
    wide = angle.to(tl.float64)
    tl.store(cos_ptr + row * F + pairs, tl.cos(wide).to(tl.float32), mask=inside)
    tl.store(sin_ptr + row * F + pairs, tl.sin(wide).to(tl.float32), mask=inside)


@triton.jit
def partner_of(columns, HALF: tl.constexpr):
    """The column that turns with each: HALF further on, or HALF back."""
    return tl.where(columns < HALF, columns + HALF, columns - HALF)


@triton.jit
def load_rotation(cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(cos, sin) float32 [BLOCK] of a row's [HALF], for each column of a head; those that do not turn have (1, 0)."""
    columns = tl.arange(0, BLOCK)
    pairs = tl.where(columns < HALF, columns, columns - HALF)
    cos = tl.load(cos_ptr + pairs, mask=columns < 2 * HALF, other=1.0)
    sin = tl.load(sin_ptr + pairs, mask=columns < 2 * HALF, other=0.0)
    return cos, sin


@triton.jit
def load_norm(weight_ptr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(the norm's weight, that of each column's partner), float32 [BLOCK]."""
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    partner = tl.load(weight_ptr + partner_of(columns, HALF), mask=columns < 2 * HALF, other=0.0).to(tl.float32)
    return weight, partner


@triton.jit
def turned(
    x,  # float32 [BLOCK]: one head, zeros beyond D
    partner,  # float32 [BLOCK]: its columns' partners, where they turn
    weight,  # this and the next: from `load_norm`
    partner_weight,
    cos,  # this and the next: from `load_rotation`
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
    cos_ptr,  # float32 [HALF]: this row's
    sin_ptr,  # float32 [HALF]
    out_ptr,  # [D]
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    # Element i and its partner turn together. The partner is read again (from L1), which needs no exchange of lanes.
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + partner_of(columns, HALF), mask=columns < 2 * HALF, other=0.0).to(tl.float32)
    weight, partner_weight = load_norm(weight_ptr, D, HALF, BLOCK)
    cos, sin = load_rotation(cos_ptr, sin_ptr, HALF, BLOCK)
    out = turned(x, partner, weight, partner_weight, cos, sin, eps, D, HALF, BLOCK)
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    q_gate_ptr,  # [R, Q, 2, D], rows q_stride apart
    k_ptr,  # [R, V, D], rows k_stride apart
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_ptr,  # float32 [R, HALF]
    sin_ptr,  # float32 [R, HALF]
    query_ptr,  # [R, Q, D]
    gate_ptr,  # [R, Q, D]
    key_ptr,  # [R, V, D]
    q_stride,
    k_stride,
    eps,
    Q: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # the Q query heads, then the V key heads
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
        out = (row * V + head - Q) * D
        _norm_and_rotate(in_ptr, k_weight_ptr, cos_ptr, sin_ptr, key_ptr + out, eps, D, HALF, BLOCK)


def rotary_table(positions, frequencies, mrope_section):
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
            F=num_pairs,
            BLOCK=triton.next_power_of_2(num_pairs),
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
            V=num_kv_heads,
            D=head_dim,
            HALF=cos.shape[1],
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
    return query, gate, key
