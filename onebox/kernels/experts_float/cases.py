"""Inputs of the float experts: edge blocks, shared experts, one row, no row, around a block's 64, published shapes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.formats import Dialect, quantize_fp8_block, quantize_fp8_rows, quantize_nvfp4
from onebox.kernels.case import Case, generator
from onebox.kernels.experts.cases import draw_routing

__all__ = ["CASES", "arguments", "stored_experts"]

BF16, F32 = torch.bfloat16, torch.float32


def arguments(
    device: torch.device | None,
    kind: str,
    rows: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    x_dtype: torch.dtype = BF16,
    scale_dtype: torch.dtype = F32,
) -> dict[str, Any]:
    """Keyword arguments for rows of `hidden` through top-k experts stored as "block" or "row" (FP8) or "nvfp4".

    `scale_dtype` is that of FP8.
    """
    draw = generator(rows * hidden + inner)
    ids, weights = draw_routing(rows, k, experts, draw)
    x = torch.randn(rows, hidden, generator=draw).to(x_dtype)
    stored = stored_experts(kind, experts, hidden, inner, draw, scale_dtype)
    given = {"x": x, "ids": ids, "weights": weights, **stored}
    return {name: tensor.to(device) for name, tensor in given.items()}


def stored_experts(
    kind: str, experts: int, hidden: int, inner: int, draw: torch.Generator, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Random experts, quantised one by one, under the operations' argument names."""
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    found = [
        [_stored(kind, torch.randn(shape, generator=draw) * shape[1] ** -0.5, scale_dtype) for shape in shapes]
        for _ in range(experts)
    ]
    codes, scales, multipliers = ([[parts[i] for parts in expert] for expert in found] for i in range(3))
    result = {
        "gate_up": _stack([[gate, up] for gate, up, _ in codes]),
        "gate_up_scale": _stack([[gate, up] for gate, up, _ in scales]),
        "down": _stack([[down] for _, _, down in codes]),
        "down_scale": _stack([[down] for _, _, down in scales]),
    }
    return result | ({"multipliers": _stack(multipliers)} if kind == "nvfp4" else {})


def _stored(kind: str, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, multiplier [1], of which FP8 has none and gets 1)."""
    if kind == "nvfp4":
        packed, scale, multiplier = quantize_nvfp4(weight, Dialect.MODELOPT)
        return packed, scale, multiplier.reshape(1)
    if kind == "block":
        codes, scale = quantize_fp8_block(weight, scale_dtype=scale_dtype)
    else:
        codes, scale = quantize_fp8_rows(weight, scale_dtype)
        scale = scale.flatten()
    return codes, scale, torch.ones(1)


def _stack(experts: list[list[Tensor]]) -> Tensor:
    """[E, ...] of each expert's matrices, row after row. As bytes where torch cannot join the dtype."""
    dtype = experts[0][0].dtype
    as_bytes = dtype is torch.float8_e4m3fn
    rows = [[part.view(torch.uint8) if as_bytes else part for part in parts] for parts in experts]
    return torch.stack([torch.cat(parts) for parts in rows]).view(dtype)


def _case(
    op: str,
    kind: str,
    rows: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    is_full: bool = False,
    x_dtype: torch.dtype = BF16,
    scale_dtype: torch.dtype = F32,
) -> Case:
    make = partial(
        arguments,
        kind=kind,
        rows=rows,
        k=k,
        experts=experts,
        hidden=hidden,
        inner=inner,
        x_dtype=x_dtype,
        scale_dtype=scale_dtype,
    )
    name = f"{kind}-{rows}x{hidden}-top{k}of{experts}x{inner}-{x_dtype}-{scale_dtype}".replace("torch.", "")
    return Case(op, name, make, is_full)


ROUTED_FP8, ROUTED_NVFP4 = "routed_experts_fp8", "routed_experts_nvfp4"
PREFILL_FP8, PREFILL_NVFP4 = "prefill_experts_fp8", "prefill_experts_nvfp4"

CASES = [
    _case(ROUTED_FP8, "block", 1, 2, 4, 256, 128),
    _case(ROUTED_FP8, "block", 3, 2, 3, 200, 72, scale_dtype=BF16),  # edge blocks, and the second block is up's
    _case(ROUTED_FP8, "block", 2, 2, 3, 136, 200, x_dtype=F32),
    _case(ROUTED_FP8, "row", 9, 1, 1, 72, 40),  # more sharers than a round takes
    _case(ROUTED_FP8, "row", 1, 2, 3, 264, 136, scale_dtype=BF16),
    _case(ROUTED_FP8, "block", 0, 2, 4, 128, 128),
    _case(ROUTED_NVFP4, "nvfp4", 1, 2, 4, 128, 64),
    _case(ROUTED_NVFP4, "nvfp4", 9, 2, 3, 272, 48),
    _case(ROUTED_NVFP4, "nvfp4", 2, 1, 2, 64, 272, x_dtype=F32),
    _case(PREFILL_FP8, "block", 70, 2, 3, 200, 72, scale_dtype=BF16),
    _case(PREFILL_FP8, "block", 1, 2, 8, 128, 136),
    _case(PREFILL_FP8, "row", 63, 1, 1, 136, 40),
    _case(PREFILL_FP8, "row", 0, 2, 4, 128, 128),
    _case(PREFILL_NVFP4, "nvfp4", 70, 2, 3, 144, 80),
    _case(PREFILL_NVFP4, "nvfp4", 1, 2, 8, 128, 64),
    # 122B
    _case(ROUTED_FP8, "block", 1, 8, 8, 3072, 1024, True, scale_dtype=BF16),
    _case(ROUTED_FP8, "block", 64, 8, 16, 3072, 1024, True, scale_dtype=BF16),
    _case(ROUTED_FP8, "row", 3, 8, 8, 3072, 1024, True),
    _case(ROUTED_NVFP4, "nvfp4", 1, 8, 8, 3072, 1024, True),
    _case(ROUTED_NVFP4, "nvfp4", 64, 8, 16, 3072, 1024, True),
    _case(PREFILL_FP8, "block", 200, 8, 8, 3072, 1024, True, scale_dtype=BF16),
    _case(PREFILL_FP8, "row", 130, 8, 8, 3072, 1024, True),
    _case(PREFILL_NVFP4, "nvfp4", 200, 8, 8, 3072, 1024, True),
    # 35B
    _case(ROUTED_FP8, "block", 3, 8, 8, 2048, 512, True, scale_dtype=BF16),
    _case(ROUTED_FP8, "block", 3, 8, 8, 2048, 512, True, x_dtype=F32),
    _case(ROUTED_NVFP4, "nvfp4", 8, 8, 8, 2048, 512, True),
    _case(PREFILL_FP8, "block", 333, 8, 8, 2048, 512, True, scale_dtype=BF16),
    _case(PREFILL_NVFP4, "nvfp4", 333, 8, 8, 2048, 512, True),
]
