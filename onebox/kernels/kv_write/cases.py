"""Inputs of the cache write: each format, skipped rows, vectors that are zero, huge, tiny or saturate."""

from functools import partial
from typing import Any

import torch

from onebox.formats.kv_pages import PAGE_TOKENS, allocate
from onebox.kernels.case import Case, generator
from onebox.spec.kv import KVFormat

__all__ = ["CASES"]


def _inputs(
    device: torch.device, name: str, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * head_dim + len(name)))
    num_pages = rows // PAGE_TOKENS + 2
    slots = torch.randperm(num_pages * PAGE_TOKENS, generator=generator(rows))[:rows]
    key, value = draw(rows, kv_heads, head_dim), draw(rows, kv_heads, head_dim)
    if rows > 4:
        slots[1] = -1
        key[2] *= 1e-6
        value[2] = 0
        key[3] *= 1e6
        value[3, :, 0] = 300.0  # one coordinate that dwarfs the others
    return {
        "pages": allocate(KVFormat.parse(name), num_pages, PAGE_TOKENS, kv_heads, head_dim, device),
        "key": key.to(dtype).to(device),
        "value": value.to(dtype).to(device),
        "slots": slots.to(device),
    }


def _case(name: str, rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_inputs, name=name, rows=rows, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    return Case("kv_write", f"{name}-{rows}x{kv_heads}x{head_dim}-{dtype}", make, is_full, ("pages",))


_FORMATS = ("bf16", "fp8", "turboquant_k4v4", "turboquant_k8v4")

CASES = [
    *(_case(name, 7, 2, 32, torch.bfloat16, False) for name in (*_FORMATS, "turboquant_k3v2")),
    _case("turboquant_k8v4", 5, 1, 64, torch.float32, False),
    _case("turboquant_k4v4", 1, 2, 256, torch.bfloat16, False),
    _case("fp8", 0, 2, 32, torch.bfloat16, False),
    *(_case(name, 3, 2, 256, torch.bfloat16, True) for name in _FORMATS),
    *(_case(name, 300, 2, 256, torch.bfloat16, True) for name in (*_FORMATS, "turboquant_k3v2")),
]
