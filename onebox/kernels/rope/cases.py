"""Inputs of the rotation: text and image positions, odd head sizes, rows cut from one fused projection, none."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator
from onebox.kernels.rope.frequencies import rotary_frequencies

__all__ = ["CASES"]

_THETA = 1e7
_LAST_POSITION = 262_143


def _positions(rows: int, is_image: bool) -> torch.Tensor:
    """[3, R]: text counts up to the longest context, all axes alike; an image's axes go their own ways."""
    if is_image:
        return torch.randint(0, _LAST_POSITION + 1, (3, rows), generator=generator(rows))
    return torch.arange(_LAST_POSITION + 1 - rows, _LAST_POSITION + 1).expand(3, rows)


def _table(
    device: torch.device, rows: int, rotary_dim: int, section: tuple[int, ...], is_image: bool
) -> dict[str, Any]:
    return {
        "positions": _positions(rows, is_image).to(device),
        "frequencies": rotary_frequencies(_THETA, rotary_dim).to(device),
        "mrope_section": section,
    }


def _rotation(
    device: torch.device,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * num_heads * head_dim))
    sizes = [num_heads * 2 * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    fused = (2 * draw(rows, sum(sizes))).to(dtype).to(device)
    angles = 3 * draw(rows, rotary_dim // 2)
    q_gate, k, _ = torch.split(fused, sizes, dim=-1)
    return {
        "q_gate": q_gate,
        "k": k,
        "q_weight": (0.1 * draw(head_dim)).to(torch.bfloat16).to(device),
        "k_weight": (0.1 * draw(head_dim)).to(torch.bfloat16).to(device),
        "cos": angles.cos().to(device),
        "sin": angles.sin().to(device),
        "eps": 1e-6,
    }


CASES = [
    *(
        Case(
            "rotary_table",
            f"{rows}x{rotary_dim}-{'image' if is_image else 'text'}",
            partial(_table, rows=rows, rotary_dim=rotary_dim, section=section, is_image=is_image),
            is_full,
        )
        for rows, rotary_dim, section, is_image, is_full in [
            (1, 8, (2, 1, 1), False, False),
            (5, 16, (4, 2, 2), True, False),
            (3, 64, (11, 11, 10), True, False),
            (0, 8, (2, 1, 1), False, False),
            (3, 64, (11, 11, 10), False, True),
            (512, 64, (11, 11, 10), True, True),
        ]
    ),
    *(
        Case(
            "qk_norm_rope",
            f"{rows}x{num_heads}x{num_kv_heads}x{head_dim}-{dtype}",
            partial(
                _rotation,
                rows=rows,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                dtype=dtype,
            ),
            is_full,
        )
        for rows, num_heads, num_kv_heads, head_dim, rotary_dim, dtype, is_full in [
            (1, 4, 2, 32, 8, torch.bfloat16, False),
            (3, 2, 1, 64, 16, torch.float32, False),
            (2, 3, 1, 24, 24, torch.bfloat16, False),
            (0, 2, 1, 32, 8, torch.bfloat16, False),
            (3, 32, 2, 256, 64, torch.bfloat16, True),
            (512, 16, 2, 256, 64, torch.bfloat16, True),
            (3, 32, 2, 256, 64, torch.float32, True),
        ]
    ),
]
