"""Inputs of the routed experts and of the shared expert's operations."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.formats import Dialect, quantize_fp8_block, quantize_fp8_rows, quantize_nvfp4
from onebox.formats.expert_tiles import pack_down, pack_gate_up
from onebox.kernels.common.case import Case, generator
from onebox.kernels.float_linear.cases import float_weight
from onebox.kernels.int_linear.cases import fixed_rows

__all__ = [
    "CASES",
    "arguments",
    "draw_routing",
    "fixed_point",
    "float_experts",
    "fused_arguments",
    "int_experts",
    "stored_experts",
]

_Shape = tuple[int, int, int, int, int]  # rows, k, experts, hidden, inner
_Bits = tuple[int, int]  # of gate_up, of down
_INTEGERS: dict[str, _Bits] = {"int4": (4, 4), "int3": (3, 3), "int34": (3, 4), "int32": (3, 2), "int2": (2, 2)}


def _name(shape: _Shape) -> str:
    rows, k, experts, hidden, inner = shape
    return f"{rows}x{hidden}-top{k}of{experts}x{inner}"


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


def int_experts(
    experts: int, hidden: int, inner: int, scale_dtype: torch.dtype, draw: torch.Generator, bits: _Bits = (4, 4)
) -> dict[str, Tensor]:
    """Random integer experts as tiles, under the operations' argument names; `bits` of gate_up and of down."""
    result = {}
    matrices = ("gate_up", 2 * inner, hidden, pack_gate_up), ("down", hidden, inner, pack_down)
    for (name, rows, columns, pack), num_bits in zip(matrices, bits, strict=True):
        middle = 2 ** (num_bits - 1)
        codes = torch.randint(-middle, middle, (experts, rows, columns), dtype=torch.int8, generator=draw)
        scales = (torch.rand(experts, rows, columns // 128, generator=draw) + 0.5) * 2 / (middle * columns**0.5)
        result[name], result[f"{name}_scale"] = pack(codes, scales.to(scale_dtype), num_bits)
    return result


def float_experts(experts: int, hidden: int, inner: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Random bfloat16 experts, under the operations' argument names."""
    return {
        "gate_up": (torch.randn(experts, 2 * inner, hidden, generator=draw) / hidden**0.5).to(torch.bfloat16),
        "down": (torch.randn(experts, hidden, inner, generator=draw) / inner**0.5).to(torch.bfloat16),
    }


def _inputs(
    device: torch.device, shape: _Shape, scale_dtype: torch.dtype | None, bits: _Bits = (4, 4)
) -> dict[str, Any]:
    rows, k, experts, hidden, inner = shape
    draw = generator(rows * hidden + inner)
    ids, weights = draw_routing(rows, k, experts, draw)
    x = torch.randn(rows, hidden, generator=draw).to(torch.bfloat16)
    arguments = {"ids": ids, "weights": weights}
    if scale_dtype is None:
        arguments |= {"x": x, **float_experts(experts, hidden, inner, draw)}
    else:
        arguments["planes"], arguments["scale"] = fixed_point(x)
        arguments |= int_experts(experts, hidden, inner, scale_dtype, draw, bits)
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _prefill_inputs(
    device: torch.device, shape: _Shape, scale_dtype: torch.dtype | None, bits: _Bits = (4, 4)
) -> dict[str, Any]:
    tokens, k, experts, hidden, inner = shape
    draw = generator(tokens * hidden + inner)
    ids, weights = draw_routing(tokens, k, experts, draw)
    matrices = (
        float_experts(experts, hidden, inner, draw)
        if scale_dtype is None
        else int_experts(experts, hidden, inner, scale_dtype, draw, bits)
    )
    x = torch.randn(tokens, hidden, generator=draw).to(torch.bfloat16)
    arguments = {"x": x, "ids": ids, "weights": weights, **matrices}
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def fused_arguments(
    device: torch.device, kind: str, shape: _Shape, shared: str | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of a fused operation with experts of a `kind`: one of _INTEGERS, "block", "row", "nvfp4" or "bf16"."""
    rows, k, experts, hidden, inner = shape
    draw = generator(rows * hidden + inner)
    ids, weights = draw_routing(rows, k, experts, draw)
    given = fixed_rows(rows, hidden, dtype)
    if kind in _INTEGERS:
        scale_dtype = torch.float16 if kind == "int4" else torch.bfloat16
        stored = int_experts(experts, hidden, inner, scale_dtype, draw, _INTEGERS[kind])
    elif kind == "bf16":
        stored = float_experts(experts, hidden, inner, draw)
    else:
        stored = stored_experts(kind, experts, hidden, inner, draw, torch.float32)
    arguments = {"ids": ids, "weights": weights, **stored}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in arguments.items()}
    moved["rows"] = given.to(device)
    if shared:
        matrix = torch.randn(hidden, inner, generator=draw) * inner**-0.5
        parts = torch.randn(3, rows, 2 * inner, generator=draw)
        if dtype == torch.bfloat16 and shared != "other":
            # An intermediate rounding could differ between kernel and twin if a last bit differs: so sigmoid(gate) is
            # one, and the product fits bfloat16.
            parts = (parts * 2).round().clamp(-8, 8)
            parts[0, :, :inner] += 64
        moved["shared"] = parts.to(device), None if shared == "other" else float_weight(shared, matrix, device)
    return moved


def _slots_case(
    shape: _Shape,
    shared: str | None = None,
    is_full: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "int4",
) -> Case:
    """`shared` is the format of the shared expert's down, "other" one without a float weight; `kind` the experts'."""
    make = partial(fused_arguments, kind=kind, shape=shape, shared=shared, dtype=dtype)
    name = "int4" if kind in _INTEGERS else {"block": "fp8", "row": "fp8"}.get(kind, kind)
    return Case(f"routed_experts_{name}_fused", f"{kind}-{_name(shape)}-{shared}-{dtype}", make, is_full)


def _case(
    shape: _Shape,
    scale_dtype: torch.dtype | None = None,
    is_full: bool = False,
    *,
    is_prefill: bool = False,
    kind: str = "int4",
) -> Case:
    """A case of a `kind` of _INTEGERS with scales of a dtype, or a BF16 case without."""
    op = f"{'prefill' if is_prefill else 'routed'}_experts_{'bf16' if scale_dtype is None else 'int4'}"
    make = partial(
        _prefill_inputs if is_prefill else _inputs, shape=shape, scale_dtype=scale_dtype, bits=_INTEGERS[kind]
    )
    return Case(op, f"{'' if kind == 'int4' else f'{kind}-'}{_name(shape)}-{scale_dtype}", make, is_full)


_INT_CASES = [
    _case((1, 2, 4, 128, 128), torch.float16),
    _case((2, 2, 2, 256, 256), torch.bfloat16),
    _case((5, 1, 1, 128, 128), torch.float16),
    _case((0, 2, 4, 128, 128), torch.float16),
    _slots_case((1, 2, 4, 256, 128)),
    _slots_case((6, 2, 2, 128, 256), "block"),
    _slots_case((2, 1, 3, 128, 128), "nvfp4"),
    _slots_case((0, 2, 4, 128, 128), "bf16"),
    _slots_case((2, 3, 4, 128, 128), "row", dtype=torch.float32),
    _slots_case((1, 2, 4, 128, 128), "other"),
    _slots_case((18, 2, 3, 128, 256), "block"),  # listed by expert, with more pairs than a round takes
    _case((1, 1, 1, 128, 128), torch.bfloat16, kind="int2"),
    _slots_case((17, 1, 1, 128, 128), kind="int34"),  # listed by expert
    _case((1, 2, 4, 128, 64)),
    _case((3, 2, 3, 200, 72)),
    _case((9, 1, 1, 72, 40)),
    _slots_case((1, 8, 16, 3072, 1024), "block", True),
    _slots_case((12, 8, 32, 3072, 1024), "block", True),
    _slots_case((96, 8, 32, 3072, 1024), "block", True),
    _slots_case((3, 8, 16, 2048, 512), "nvfp4", True),
    _slots_case((1, 8, 8, 3072, 1024), None, True, kind="int3"),
    _slots_case((96, 8, 8, 3072, 1024), None, True, kind="int32"),
    _case((1, 8, 16, 3072, 1024), torch.float16, True),
    _case((3, 8, 16, 3072, 1024), torch.float16, True),
    _case((64, 8, 16, 3072, 1024), torch.bfloat16, True),
    _case((8, 8, 16, 2048, 512), torch.float16, True),
    _case((1, 8, 8, 3072, 1024), None, True),
    _case((17, 8, 8, 3072, 1024), None, True),
    _case((8, 8, 16, 2048, 512), None, True),
]


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


def _float_case(
    op: str,
    kind: str,
    shape: _Shape,
    is_full: bool = False,
    x_dtype: torch.dtype = BF16,
    scale_dtype: torch.dtype = F32,
) -> Case:
    name = f"{kind}-{_name(shape)}-{x_dtype}-{scale_dtype}".replace("torch.", "")
    return Case(op, name, lambda device: arguments(device, kind, *shape, x_dtype, scale_dtype), is_full)


ROUTED_FP8, ROUTED_NVFP4 = "routed_experts_fp8", "routed_experts_nvfp4"
PREFILL_FP8, PREFILL_NVFP4 = "prefill_experts_fp8", "prefill_experts_nvfp4"

_FLOAT_CASES = [
    _float_case(ROUTED_FP8, "block", (1, 2, 4, 256, 128)),
    _float_case(ROUTED_FP8, "block", (3, 2, 3, 200, 72), scale_dtype=BF16),  # edge blocks, and the second block is up's
    _float_case(ROUTED_FP8, "block", (2, 2, 3, 136, 200), x_dtype=F32),
    _float_case(ROUTED_FP8, "row", (9, 1, 1, 72, 40)),  # more sharers than a round takes
    _float_case(ROUTED_FP8, "row", (1, 2, 3, 264, 136), scale_dtype=BF16),
    _float_case(ROUTED_FP8, "block", (0, 2, 4, 128, 128)),
    _float_case(ROUTED_NVFP4, "nvfp4", (1, 2, 4, 128, 64)),
    _float_case(ROUTED_NVFP4, "nvfp4", (9, 2, 3, 272, 48)),
    _float_case(ROUTED_NVFP4, "nvfp4", (2, 1, 2, 64, 272), x_dtype=F32),
    _float_case(PREFILL_FP8, "block", (70, 2, 3, 200, 72), scale_dtype=BF16),
    _float_case(PREFILL_FP8, "block", (1, 2, 8, 128, 136)),
    _float_case(PREFILL_FP8, "row", (63, 1, 1, 136, 40)),
    _float_case(PREFILL_FP8, "row", (0, 2, 4, 128, 128)),
    _float_case(PREFILL_NVFP4, "nvfp4", (70, 2, 3, 144, 80)),
    _float_case(PREFILL_NVFP4, "nvfp4", (1, 2, 8, 128, 64)),
    # 122B
    _float_case(ROUTED_FP8, "block", (1, 8, 8, 3072, 1024), True, scale_dtype=BF16),
    _float_case(ROUTED_FP8, "block", (64, 8, 16, 3072, 1024), True, scale_dtype=BF16),
    _float_case(ROUTED_FP8, "row", (3, 8, 8, 3072, 1024), True),
    _float_case(ROUTED_NVFP4, "nvfp4", (1, 8, 8, 3072, 1024), True),
    _float_case(ROUTED_NVFP4, "nvfp4", (64, 8, 16, 3072, 1024), True),
    _float_case(PREFILL_FP8, "block", (200, 8, 8, 3072, 1024), True, scale_dtype=BF16),
    _float_case(PREFILL_FP8, "row", (130, 8, 8, 3072, 1024), True),
    _float_case(PREFILL_NVFP4, "nvfp4", (200, 8, 8, 3072, 1024), True),
    # 35B
    _float_case(ROUTED_FP8, "block", (3, 8, 8, 2048, 512), True, scale_dtype=BF16),
    _float_case(ROUTED_FP8, "block", (3, 8, 8, 2048, 512), True, x_dtype=F32),
    _float_case(ROUTED_NVFP4, "nvfp4", (8, 8, 8, 2048, 512), True),
    _float_case(PREFILL_FP8, "block", (333, 8, 8, 2048, 512), True, scale_dtype=BF16),
    _float_case(PREFILL_NVFP4, "nvfp4", (333, 8, 8, 2048, 512), True),
]


_FUSED_FLOAT_CASES = [
    _slots_case((1, 2, 4, 256, 128), kind="nvfp4"),
    _slots_case((18, 2, 4, 128, 128), "nvfp4", kind="nvfp4"),
    _slots_case((0, 2, 4, 128, 128), "bf16", kind="nvfp4"),
    _slots_case((2, 3, 4, 128, 128), "row", dtype=torch.float32, kind="nvfp4"),
    _slots_case((17, 1, 1, 256, 128), "block", kind="block"),
    _slots_case((1, 2, 4, 128, 128), "other", kind="row"),
    _slots_case((2, 2, 3, 256, 128), "bf16", kind="bf16"),
    *(_slots_case((rows, 8, 16, 3072, 1024), "block", True, kind="nvfp4") for rows in (1, 4, 12, 96)),
    *(_slots_case((rows, 8, 16, 3072, 1024), "block", True, kind="block") for rows in (1, 96)),
    _slots_case((4, 8, 16, 3072, 1024), "row", True, kind="row"),
    _slots_case((3, 8, 16, 2048, 512), "nvfp4", True, kind="nvfp4"),
    *(_slots_case((rows, 8, 16, 2048, 512), "bf16", True, kind="bf16") for rows in (1, 32)),
]


_PREFILL_CASES = [
    _case(shape, scale_dtype, is_full, is_prefill=True)
    for shape, scale_dtype, is_full in [
        ((1, 2, 8, 128, 128), torch.float16, False),
        ((130, 2, 3, 256, 128), torch.bfloat16, False),
        ((65, 1, 1, 128, 384), torch.float16, False),
        ((0, 2, 4, 128, 128), torch.float16, False),
        ((1, 2, 8, 128, 64), None, False),
        ((130, 2, 3, 200, 72), None, False),
        ((63, 1, 1, 264, 136), None, False),
        ((200, 8, 16, 3072, 1024), torch.float16, True),
        ((333, 8, 16, 2048, 512), torch.bfloat16, True),
        ((130, 8, 8, 3072, 1024), None, True),
        ((200, 8, 16, 2048, 512), None, True),
    ]
]
_PREFILL_CASES += [
    _case((3, 1, 2, 256, 128), torch.bfloat16, is_prefill=True, kind="int3"),
    _case((1, 1, 1, 128, 128), torch.float16, is_prefill=True, kind="int2"),
    _case((200, 8, 8, 3072, 1024), torch.float32, True, is_prefill=True, kind="int32"),
]


# (rows, width, dtype, is_full): the width is I of SwiGLU, H of the shared expert.
_SMALL = [
    (1, 64, torch.bfloat16, False),
    (3, 200, torch.float32, False),
    (2, 1100, torch.bfloat16, False),
    (0, 64, torch.bfloat16, False),
]
_FULL = {
    "swiglu": [(3, 1024, torch.bfloat16, True), (512, 512, torch.float32, True)],
    "add_shared": [(3, 3072, torch.bfloat16, True), (512, 2048, torch.float32, True)],
}


def _gate_inputs(device: torch.device, op: str, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * width))
    # Logits large enough that some sigmoids are almost 0 or 1.
    wide = 12 * draw(rows, width)
    arguments: dict[str, Any]
    if op == "swiglu":
        arguments = {"gate_up": torch.cat([wide, draw(rows, width)], dim=-1).to(dtype)}
    else:
        arguments = {
            "routed": draw(rows, width),
            "shared": draw(rows, width).to(dtype),
            # One column of a wider projection: a router with the shared expert's gate appended.
            "shared_gate_logit": wide[:, :5].to(dtype).to(device)[:, 4],
        }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _gate_case(op: str, rows: int, width: int, dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_gate_inputs, op=op, rows=rows, width=width, dtype=dtype)
    return Case(op, f"{rows}x{width}-{dtype}", make, is_full)


_GATE_CASES = [_gate_case(op, *shape) for op, full in _FULL.items() for shape in _SMALL + full]


CASES = [*_INT_CASES, *_FLOAT_CASES, *_FUSED_FLOAT_CASES, *_PREFILL_CASES, *_GATE_CASES]
