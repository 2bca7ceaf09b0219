"""Inputs of the router with the shared expert: one part and several, ties, no row, the published sizes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]


def _inputs(
    device: torch.device, rows: int, sizes: tuple[int, int], parts: tuple[int, int], k: int, dtype: torch.dtype
) -> dict[str, Any]:
    experts, inner = sizes
    draw = partial(torch.randn, generator=generator(rows + experts + inner))
    # Quarters add up exactly, so that there are ties.
    router = (4 * draw(parts[0], rows, experts + 1)).round() / 4
    return {
        "router_parts": router.to(device),
        "gate_up_parts": (2 * draw(parts[1], rows, 2 * inner)).to(device),
        "k": k,
        "dtype": dtype,
    }


def _case(
    rows: int, sizes: tuple[int, int], parts: tuple[int, int], k: int, dtype: torch.dtype, *, is_full: bool = False
) -> Case:
    make = partial(_inputs, rows=rows, sizes=sizes, parts=parts, k=k, dtype=dtype)
    return Case("route_shared", f"{rows}x{sizes}-parts{parts}-top{k}-{dtype}", make, is_full)


CASES = [
    _case(1, (8, 128), (1, 1), 2, torch.bfloat16),
    _case(3, (37, 256), (2, 3), 4, torch.float32),
    _case(0, (8, 128), (2, 1), 2, torch.bfloat16),
    _case(1, (256, 1024), (12, 6), 8, torch.bfloat16, is_full=True),
    _case(12, (256, 512), (4, 4), 8, torch.bfloat16, is_full=True),
]
