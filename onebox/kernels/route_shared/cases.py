"""Inputs of the router with the shared expert: no shared expert and each format, ties, no row, the published sizes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator
from onebox.kernels.float_parts.cases import float_weight
from onebox.kernels.int_linear.cases import fixed_rows

__all__ = ["CASES"]


def _inputs(
    device: torch.device, rows: int, width: int, experts: int, parts: int, k: int, shared: tuple[str, int] | None
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + experts + width))
    # Quarters add up exactly, so that there are ties.
    router = (4 * draw(parts, rows, experts + 1)).round() / 4
    arguments: dict[str, Any] = {
        "router_parts": router.to(device),
        "k": k,
        "rows": fixed_rows(rows, width, torch.bfloat16).to(device),
    }
    if shared:
        kind, columns = shared
        arguments["gate_up"] = float_weight(kind, draw(columns, width) * width**-0.5, device)
    return arguments


def _case(
    rows: int,
    width: int,
    experts: int,
    parts: int,
    k: int,
    shared: tuple[str, int] | None = None,
    *,
    is_full: bool = False,
) -> Case:
    make = partial(_inputs, rows=rows, width=width, experts=experts, parts=parts, k=k, shared=shared)
    name = "alone" if shared is None else f"{shared[0]}{shared[1]}"
    return Case("route_shared", f"{rows}x{width}-top{k}of{experts}-parts{parts}-{name}", make, is_full)


CASES = [
    _case(1, 128, 8, 1, 2),
    _case(3, 256, 37, 2, 4, ("block", 256)),
    _case(2, 128, 8, 3, 1, ("nvfp4", 64)),
    _case(5, 256, 16, 2, 16, ("row", 32)),
    _case(0, 128, 8, 2, 2, ("bf16", 64)),
    _case(1, 3072, 256, 12, 8, ("block", 2048), is_full=True),
    _case(12, 3072, 256, 12, 8, ("block", 2048), is_full=True),
    _case(64, 3072, 256, 12, 8, ("block", 2048), is_full=True),
    _case(3, 2048, 256, 8, 8, ("nvfp4", 1024), is_full=True),
    _case(3, 2048, 256, 8, 8, is_full=True),
]
