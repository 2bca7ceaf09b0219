"""Inputs of the routed experts for many tokens: around a block's 64, an expert nobody chose, the published shapes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator
from onebox.kernels.experts.cases import draw_routing, float_experts, int4_experts

__all__ = ["CASES"]


def _inputs(
    device: torch.device, tokens: int, k: int, experts: int, hidden: int, inner: int, scale_dtype: torch.dtype | None
) -> dict[str, Any]:
    draw = generator(tokens * hidden + inner)
    ids, weights = draw_routing(tokens, k, experts, draw)
    matrices = (
        float_experts(experts, hidden, inner, draw)
        if scale_dtype is None
        else int4_experts(experts, hidden, inner, scale_dtype, draw)
    )
    x = torch.randn(tokens, hidden, generator=draw).to(torch.bfloat16)
    arguments = {"x": x, "ids": ids, "weights": weights, **matrices}
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _case(
    tokens: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    scale_dtype: torch.dtype | None = None,
    is_full: bool = False,
) -> Case:
    """An INT4 case with scales of a dtype, or a BF16 case without."""
    op = "prefill_experts_bf16" if scale_dtype is None else "prefill_experts"
    make = partial(_inputs, tokens=tokens, k=k, experts=experts, hidden=hidden, inner=inner, scale_dtype=scale_dtype)
    return Case(op, f"{tokens}x{hidden}-top{k}of{experts}x{inner}-{scale_dtype}", make, is_full)


CASES = [
    _case(1, 2, 8, 128, 128, torch.float16),
    _case(130, 2, 3, 256, 128, torch.bfloat16),
    _case(65, 1, 1, 128, 384, torch.float16),
    _case(0, 2, 4, 128, 128, torch.float16),
    _case(1, 2, 8, 128, 64),
    _case(130, 2, 3, 200, 72),
    _case(63, 1, 1, 264, 136),
    _case(200, 8, 16, 3072, 1024, torch.float16, True),
    _case(333, 8, 16, 2048, 512, torch.bfloat16, True),
    _case(130, 8, 8, 3072, 1024, None, True),
    _case(200, 8, 16, 2048, 512, None, True),
]
