"""Inputs of what leaves a mixer: one part and several, heads of a group and of half a group, the published sizes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]


def _delta(
    device: torch.device, rows: int, heads: int, value_dim: int, parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + heads + parts))
    width = heads * value_dim
    # z is the middle of a wider projection.
    joined = draw(parts, rows, width + 48).to(device)
    return {
        "mixed": draw(rows, heads, value_dim).to(device),
        "z_parts": joined[:, :, 32 : 32 + width],
        "weight": (1 + 0.1 * draw(value_dim)).to(device),
        "eps": 1e-6,
        "dtype": dtype,
    }


def _attention(
    device: torch.device, rows: int, heads: int, head_dim: int, parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + heads + parts))
    qkv = 3 * draw(parts, rows, 2 * heads * head_dim + 4 * head_dim)
    return {"attended": draw(rows, heads, head_dim).to(dtype).to(device), "qkv_parts": qkv.to(device)}


def _case(
    op: str, rows: int, heads: int, dim: int, parts: int, dtype: torch.dtype = torch.bfloat16, *, is_full: bool = False
) -> Case:
    inputs = _delta if op == "delta_rows" else _attention
    make = partial(inputs, rows=rows, heads=heads, parts=parts, dtype=dtype)
    sized = partial(make, value_dim=dim) if op == "delta_rows" else partial(make, head_dim=dim)
    return Case(op, f"{rows}x{heads}x{dim}-{parts}-{dtype}", sized, is_full)


CASES = [
    _case("delta_rows", 1, 2, 128, 1),
    _case("delta_rows", 3, 4, 64, 3, torch.float32),
    _case("delta_rows", 0, 2, 128, 2),
    _case("delta_rows", 1, 64, 128, 3, is_full=True),
    _case("delta_rows", 12, 32, 128, 2, is_full=True),
    _case("attention_rows", 1, 2, 64, 1),
    _case("attention_rows", 3, 2, 256, 2, torch.float32),
    _case("attention_rows", 0, 2, 64, 2),
    _case("attention_rows", 1, 32, 256, 3, is_full=True),
    _case("attention_rows", 12, 16, 256, 3, is_full=True),
]
