"""Inputs of attention's heads: one part and several, a head without rotation's end, no row, the published sizes."""

from functools import partial
from typing import Any

import torch

from onebox.formats.kv_pages import allocate
from onebox.kernels.case import Case, generator
from onebox.spec.kv import KVFormat

__all__ = ["CASES"]


def _inputs(
    device: torch.device, rows: int, heads: tuple[int, int], dims: tuple[int, int], parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    (num_heads, num_kv_heads), (head_dim, half) = heads, dims
    draw = partial(torch.randn, generator=generator(rows + num_heads + head_dim))
    angle = 10 * draw(rows, half)
    tensors = {
        "qkv_parts": draw(parts, rows, 2 * (num_heads + num_kv_heads) * head_dim),
        "q_weight": 0.1 * draw(head_dim),
        "k_weight": 0.1 * draw(head_dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return moved | {"eps": 1e-6, "num_kv_heads": num_kv_heads, "dtype": dtype}


def _case(
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    parts: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_full: bool = False,
) -> Case:
    make = partial(_inputs, rows=rows, heads=heads, dims=dims, parts=parts, dtype=dtype)
    return Case("split_heads", f"{rows}x{heads}x{dims}-{parts}-{dtype}", make, is_full)


def _paged_inputs(device: torch.device, kv: str, **shape: Any) -> dict[str, Any]:
    """The same with pages to write to; the second row is written nowhere."""
    arguments = _inputs(device, **shape)
    pages = allocate(KVFormat.parse(kv), 4, 64, arguments.pop("num_kv_heads"), shape["dims"][0], device)
    slots = torch.randperm(4 * 64, generator=generator(shape["rows"]))[: shape["rows"]]
    slots[1:2] = -1
    return {**arguments, "pages": pages, "slots": slots.to(device)}


def _paged_case(
    kv: str,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_full: bool = False,
) -> Case:
    make = partial(_paged_inputs, kv=kv, rows=rows, heads=heads, dims=dims, parts=3, dtype=dtype)
    return Case("write_heads", f"{kv}-{rows}x{heads}x{dims}-{dtype}", make, is_full, mutates=("pages",))


CASES = [
    _case(1, (2, 1), (64, 16), 1),
    _case(3, (4, 2), (96, 32), 3, torch.float32),
    _case(0, (2, 1), (64, 16), 2),
    _case(1, (32, 2), (256, 32), 3, is_full=True),
    _case(12, (16, 2), (256, 32), 3, is_full=True),
    _paged_case("bf16", 3, (4, 2), (64, 16)),
    _paged_case("bf16", 2, (2, 1), (128, 32), torch.float32),
    _paged_case("fp8", 2, (4, 2), (64, 16), torch.float32),
    _paged_case("bf16", 1, (32, 2), (256, 32), is_full=True),
    _paged_case("bf16", 12, (32, 2), (256, 32), is_full=True),
]
