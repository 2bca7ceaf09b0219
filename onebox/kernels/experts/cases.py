"""Inputs of the routed experts for a few rows: shared experts, one row, one expert, the published shapes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.formats.expert_tiles import pack_down, pack_gate_up
from onebox.kernels.case import Case, generator
from onebox.kernels.float_parts.cases import float_weight
from onebox.kernels.int_linear.cases import fixed_rows

__all__ = ["CASES", "draw_routing", "fixed_point", "float_experts", "int4_experts"]


def fixed_point(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [R, K] as 16-bit fixed point for each group of 128: (planes int8 [R, 2, K], scale float32 [R, K/128])."""
    groups = x.to(torch.float32).reshape(len(x), x.shape[-1] // 128, 128)
    scale = groups.abs().amax(-1) / 32639  # 127 * 256 + 127: both planes fit a signed byte
    value = (groups / scale.clamp(min=1e-30)[..., None]).round().to(torch.int32).flatten(1)
    high = (value + 128) >> 8
    return torch.stack((high, value - high * 256), dim=1).to(torch.int8), scale


def draw_routing(rows: int, k: int, experts: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ids int32 [R, k], all different in a row, weights float32 [R, k] that sum to 1)."""
    logits = torch.randn(rows, experts, generator=draw)
    ranked, ids = logits.sort(dim=-1, descending=True)
    return ids[:, :k].to(torch.int32).contiguous(), ranked[:, :k].softmax(-1)


def int4_experts(
    experts: int, hidden: int, inner: int, scale_dtype: torch.dtype, draw: torch.Generator
) -> dict[str, Tensor]:
    """Random INT4 experts as tiles, under the operations' argument names."""
    result = {}
    for name, rows, columns, pack in (("gate_up", 2 * inner, hidden, pack_gate_up), ("down", hidden, inner, pack_down)):
        codes = torch.randint(-8, 8, (experts, rows, columns), dtype=torch.int8, generator=draw)
        scales = (torch.rand(experts, rows, columns // 128, generator=draw) + 0.5) / (4 * columns**0.5)
        result[name], result[f"{name}_scale"] = pack(codes, scales.to(scale_dtype))
    return result


def float_experts(experts: int, hidden: int, inner: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Random bfloat16 experts, under the operations' argument names."""
    return {
        "gate_up": (torch.randn(experts, 2 * inner, hidden, generator=draw) / hidden**0.5).to(torch.bfloat16),
        "down": (torch.randn(experts, hidden, inner, generator=draw) / inner**0.5).to(torch.bfloat16),
    }


def _inputs(
    device: torch.device, rows: int, k: int, experts: int, hidden: int, inner: int, scale_dtype: torch.dtype | None
) -> dict[str, Any]:
    draw = generator(rows * hidden + inner)
    ids, weights = draw_routing(rows, k, experts, draw)
    x = torch.randn(rows, hidden, generator=draw).to(torch.bfloat16)
    arguments = {"ids": ids, "weights": weights}
    if scale_dtype is None:
        arguments |= {"x": x, **float_experts(experts, hidden, inner, draw)}
    else:
        arguments["planes"], arguments["scale"] = fixed_point(x)
        arguments |= int4_experts(experts, hidden, inner, scale_dtype, draw)
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _slots_inputs(
    device: torch.device,
    rows: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    shared: str | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    draw = generator(rows * hidden + inner)
    ids, weights = draw_routing(rows, k, experts, draw)
    given = fixed_rows(rows, hidden, dtype)
    arguments = {"ids": ids, "weights": weights, **int4_experts(experts, hidden, inner, torch.float16, draw)}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in arguments.items()}
    moved["rows"] = given.to(device)
    if shared:
        matrix = torch.randn(hidden, inner, generator=draw) * inner**-0.5
        parts = torch.randn(3, rows, 2 * inner, generator=draw)
        if dtype == torch.bfloat16 and shared != "other":
            # What is rounded in between would be rounded otherwise by a twin whose last bit differs: sigmoid(gate) is
            # one, and the product fits.
            parts = (parts * 2).round().clamp(-8, 8)
            parts[0, :, :inner] += 64
        moved["shared"] = parts.to(device), None if shared == "other" else float_weight(shared, matrix, device)
    return moved


def _slots_case(
    rows: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    shared: str | None = None,
    is_full: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """`shared` is the format of the shared expert's down, "other" one without a float weight."""
    make = partial(
        _slots_inputs, rows=rows, k=k, experts=experts, hidden=hidden, inner=inner, shared=shared, dtype=dtype
    )
    return Case("expert_slots", f"{rows}x{hidden}-top{k}of{experts}x{inner}-{shared}-{dtype}", make, is_full)


def _case(
    rows: int,
    k: int,
    experts: int,
    hidden: int,
    inner: int,
    scale_dtype: torch.dtype | None = None,
    is_full: bool = False,
) -> Case:
    """An INT4 case with scales of a dtype, or a BF16 case without."""
    op = "routed_experts_bf16" if scale_dtype is None else "routed_experts"
    make = partial(_inputs, rows=rows, k=k, experts=experts, hidden=hidden, inner=inner, scale_dtype=scale_dtype)
    return Case(op, f"{rows}x{hidden}-top{k}of{experts}x{inner}-{scale_dtype}", make, is_full)


CASES = [
    _case(1, 2, 4, 128, 128, torch.float16),
    _case(2, 2, 2, 256, 256, torch.bfloat16),
    _case(5, 1, 1, 128, 128, torch.float16),
    _case(0, 2, 4, 128, 128, torch.float16),
    _slots_case(1, 2, 4, 256, 128),
    _slots_case(6, 2, 2, 128, 256, "block"),
    _slots_case(2, 1, 3, 128, 128, "nvfp4"),
    _slots_case(0, 2, 4, 128, 128, "bf16"),
    _slots_case(2, 3, 4, 128, 128, "row", dtype=torch.float32),
    _slots_case(1, 2, 4, 128, 128, "other"),
    _case(1, 2, 4, 128, 64),
    _case(3, 2, 3, 200, 72),
    _case(9, 1, 1, 72, 40),
    _slots_case(1, 8, 16, 3072, 1024, "block", True),
    _slots_case(12, 8, 32, 3072, 1024, "block", True),
    _slots_case(3, 8, 16, 2048, 512, "nvfp4", True),
    _case(1, 8, 16, 3072, 1024, torch.float16, True),
    _case(3, 8, 16, 3072, 1024, torch.float16, True),
    _case(64, 8, 16, 3072, 1024, torch.bfloat16, True),
    _case(8, 8, 16, 2048, 512, torch.float16, True),
    _case(1, 8, 8, 3072, 1024, None, True),
    _case(17, 8, 8, 3072, 1024, None, True),
    _case(8, 8, 16, 2048, 512, None, True),
]
