"""Inputs of the router: any number of experts, ties, one expert, no row, with and without a shared expert."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.common.case import Case, generator
from onebox.kernels.float_linear.cases import float_weight
from onebox.kernels.int_linear.cases import fixed_rows

__all__ = ["CASES"]


def _inputs(device: torch.device, rows: int, experts: int, k: int, step: float, blank: int) -> dict[str, Any]:
    logits = 3 * torch.randn(rows, experts, generator=generator(rows * experts + k))
    if step:  # a coarse grid makes many ties, and both zeros
        logits = (logits / step).round() * step
    return {"logits": logits.to(device), "k": k, "num_rows": _num_rows(rows, blank, device)}


def _num_rows(rows: int, blank: int, device: torch.device) -> torch.Tensor | None:
    return torch.tensor([rows - blank], dtype=torch.int32, device=device) if blank else None


def _case(rows: int, experts: int, k: int, step: float = 0.0, blank: int = 0, is_full: bool = False) -> Case:
    make = partial(_inputs, rows=rows, experts=experts, k=k, step=step, blank=blank)
    name = f"{rows}x{experts}-top{k}{'-ties' if step else ''}{f'-{blank}-blank' if blank else ''}"
    return Case("route", name, make, is_full)


def _shared_inputs(
    device: torch.device,
    rows: int,
    width: int,
    experts: int,
    parts: int,
    k: int,
    shared: tuple[str, int] | None,
    blank: int,
    is_divided: bool,
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + experts + width))
    # Quarters add up exactly, so that there are ties.
    router = (4 * draw(parts, rows, experts + 1)).round() / 4
    arguments: dict[str, Any] = {
        "router_parts": router.to(device),
        "k": k,
        "rows": fixed_rows(rows, width, torch.bfloat16).to(device),
        "num_rows": _num_rows(rows, blank, device),
        "is_divided": is_divided,
    }
    if shared:
        kind, columns = shared
        arguments["gate_up"] = float_weight(kind, draw(columns, width) * width**-0.5, device)
    return arguments


def _shared_case(
    rows: int,
    width: int,
    experts: int,
    parts: int,
    k: int,
    shared: tuple[str, int] | None = None,
    *,
    blank: int = 0,
    is_divided: bool = True,
    is_full: bool = False,
) -> Case:
    make = partial(
        _shared_inputs,
        rows=rows,
        width=width,
        experts=experts,
        parts=parts,
        k=k,
        shared=shared,
        blank=blank,
        is_divided=is_divided,
    )
    name = "alone" if shared is None else f"{shared[0]}{shared[1]}"
    name += "" if is_divided else "-undivided"
    name += f"-{blank}-blank" if blank else ""
    return Case("route_fused", f"{rows}x{width}-top{k}of{experts}-parts{parts}-{name}", make, is_full)


def _norm_inputs(
    device: torch.device, rows: int, hidden: int, outputs: int, parts: int, dtype: torch.dtype
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + hidden + outputs))
    tensors = {
        "residual": 3 * draw(rows, hidden),
        "parts": draw(parts, rows, hidden),
        "weight": 0.1 * draw(hidden),
        "router": (draw(outputs, hidden) * hidden**-0.5).to(torch.bfloat16),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"eps": 1e-6, "dtype": dtype}


def _norm_case(
    rows: int, hidden: int, outputs: int, parts: int, dtype: torch.dtype = torch.bfloat16, is_full: bool = False
) -> Case:
    make = partial(_norm_inputs, rows=rows, hidden=hidden, outputs=outputs, parts=parts, dtype=dtype)
    return Case("add_rms_norm_router", f"{rows}x{hidden}-{outputs}-parts{parts}-{dtype}", make, is_full)


CASES = [
    _case(1, 8, 2),
    _case(3, 5, 5),
    _case(4, 37, 3, step=2.0),
    _case(5, 256, 8, step=0.5),
    _case(2, 60, 16),
    _case(2, 1, 1),
    _case(0, 8, 2),
    _case(5, 37, 3, blank=2),
    _case(1, 256, 8, is_full=True),
    _case(64, 256, 8, is_full=True),
    _case(2048, 256, 8, step=0.25, is_full=True),
    _shared_case(1, 128, 8, 1, 2),
    _shared_case(3, 256, 37, 2, 4, ("block", 256)),
    _shared_case(2, 128, 8, 3, 1, ("nvfp4", 64)),
    _shared_case(4, 128, 8, 2, 3, ("block", 256), blank=3),
    _shared_case(5, 256, 16, 2, 16, ("row", 32)),
    _shared_case(0, 128, 8, 2, 2, ("bf16", 64)),
    _shared_case(3, 256, 37, 2, 4, ("block", 256), is_divided=False),
    _shared_case(2, 128, 8, 1, 2, blank=1, is_divided=False),
    _norm_case(1, 128, 9, 1),
    _norm_case(6, 256, 17, 3),
    _norm_case(2, 384, 33, 2, torch.float32),
    _norm_case(0, 128, 9, 2),
    _norm_case(18, 256, 17, 2),
    _norm_case(1, 3072, 257, 8, is_full=True),
    _norm_case(12, 3072, 257, 8, is_full=True),
    _norm_case(64, 3072, 257, 8, is_full=True),
    _norm_case(3, 2048, 257, 8, torch.float32, is_full=True),
    _shared_case(3, 3072, 256, 12, 8, ("block", 2048), is_divided=False, is_full=True),
    _shared_case(1, 3072, 256, 12, 8, ("block", 2048), is_full=True),
    _shared_case(12, 3072, 256, 12, 8, ("block", 2048), is_full=True),
    _shared_case(64, 3072, 256, 12, 8, ("block", 2048), is_full=True),
    _shared_case(16, 3072, 256, 12, 8, ("block", 2048), blank=5, is_full=True),
    _shared_case(3, 2048, 256, 8, 8, ("nvfp4", 1024), is_full=True),
    _shared_case(3, 2048, 256, 8, 8, is_full=True),
]
