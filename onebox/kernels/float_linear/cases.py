"""Inputs of the float linears: every format, edge blocks, one row, no row, published projections."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.formats import (
    Dialect,
    quantize_fp8_block,
    quantize_fp8_rows,
    quantize_fp8_tensor,
    quantize_nvfp4,
)
from onebox.kernels.common.case import Case, generator
from onebox.kernels.common.float_weight import SCALE_BLOCK, FloatWeight
from onebox.kernels.int_linear.cases import fixed_rows

__all__ = ["CASES", "arguments", "float_weight"]

BF16, F32 = torch.bfloat16, torch.float32


def arguments(
    device: torch.device, op: str, rows: int, n: int, k: int, dtype: torch.dtype, **options: Any
) -> dict[str, Any]:
    """Keyword arguments of `op` for x [rows, k], W [n, k].

    An op is "fp8_block", "fp8_row_block", "fp8_row", "nvfp4" or "bf16" and the variant.

    Options: `scale_dtype`, `per_tensor` (one FP8 scale) and `out_dtype`.
    """
    draw = partial(torch.randn, generator=generator(rows + 3 * n + 7 * k))
    weight = draw(n, k).mul_(k**-0.5)
    stored = _stored(op, weight, options.get("scale_dtype", F32), options.get("per_tensor", False))
    extra = {"out_dtype": options["out_dtype"]} if "out_dtype" in options else {}
    return {"x": draw(rows, k).to(dtype).to(device), **{name: t.to(device) for name, t in stored.items()}, **extra}


def _stored(op: str, weight: Tensor, scale_dtype: torch.dtype, per_tensor: bool) -> dict[str, Tensor]:
    kind = op.rpartition("_")[0]
    if kind == "bf16":
        return {"weight": weight.to(BF16)}
    if kind == "nvfp4":
        packed, scale, multiplier = quantize_nvfp4(weight, Dialect.MODELOPT)
        return {"packed": packed, "scale": scale, "multiplier": multiplier}
    if kind == "fp8_block":
        codes, scale = quantize_fp8_block(weight, scale_dtype=scale_dtype)
    elif kind == "fp8_row_block":
        codes, scale = quantize_fp8_block(weight, scale_dtype=scale_dtype)
        rows = torch.arange(0, 7 * len(weight), 7) % len(weight)  # of another matrix each, as in a gathered head
        codes, scale = (
            codes.view(torch.uint8)[rows].view(codes.dtype),
            scale[rows // SCALE_BLOCK] * (1 + rows % 3)[:, None],
        )
        scale = scale.to(scale_dtype)
    elif per_tensor:
        codes, scale = quantize_fp8_tensor(weight, scale_dtype)
    else:
        codes, scale = quantize_fp8_rows(weight, scale_dtype)
    return {"weight": codes, "scale": scale.flatten() if kind == "fp8_row" else scale}


def _case(op: str, rows: int, n: int, k: int, dtype: torch.dtype, is_full: bool, **options: Any) -> Case:
    make = partial(arguments, op=op, rows=rows, n=n, k=k, dtype=dtype, **options)
    notes = "".join(f"-{value if isinstance(value, torch.dtype) else key}" for key, value in options.items())
    return Case(op, f"{rows}x{n}x{k}-{dtype}{notes}".replace("torch.", ""), make, is_full)


_Input = tuple[str, int, int, int, torch.dtype, dict[str, Any]]  # op, rows, N, K, dtype of x, options

_SMALL: list[_Input] = [
    ("fp8_block_linear", 3, 48, 256, BF16, {}),
    ("fp8_block_linear", 1, 200, 520, BF16, {"scale_dtype": BF16}),  # edge blocks both ways, K in no multiple of 16
    ("fp8_block_linear", 17, 33, 512, F32, {}),
    ("fp8_block_linear", 0, 32, 128, BF16, {}),
    ("fp8_row_block_linear", 3, 200, 520, BF16, {"scale_dtype": BF16}),
    ("fp8_row_block_linear", 2, 33, 256, F32, {}),
    ("fp8_row_linear", 5, 40, 1024, BF16, {}),
    ("fp8_row_linear", 2, 32, 200, F32, {"per_tensor": True}),
    ("nvfp4_linear", 2, 40, 512, BF16, {}),
    ("nvfp4_linear", 9, 33, 272, F32, {}),
    ("bf16_linear", 1, 1, 384, BF16, {"out_dtype": F32}),  # one output column: the shared expert's gate
    ("bf16_linear", 4, 8, 512, BF16, {"out_dtype": F32}),
    ("bf16_linear", 64, 35, 72, F32, {}),
    ("fp8_block_matmul", 70, 130, 200, BF16, {"scale_dtype": BF16}),
    ("fp8_block_matmul", 3, 64, 128, F32, {}),
    ("fp8_row_matmul", 65, 48, 128, BF16, {}),
    ("fp8_row_matmul", 1, 20, 72, F32, {"per_tensor": True}),
    ("nvfp4_matmul", 67, 40, 144, BF16, {}),
    ("nvfp4_matmul", 5, 64, 64, F32, {}),
    ("bf16_matmul", 66, 8, 100, BF16, {"out_dtype": F32}),
    ("bf16_matmul", 0, 8, 64, F32, {}),
]

_FULL: list[_Input] = [
    # 122B, decode
    ("fp8_block_linear", 1, 2048, 3072, BF16, {"scale_dtype": BF16}),  # shared expert, gate and up
    ("fp8_block_linear", 3, 3072, 1024, BF16, {"scale_dtype": BF16}),  # shared expert, down
    ("fp8_block_linear", 3, 16384, 3072, BF16, {"scale_dtype": BF16}),  # attention, query and gate
    ("fp8_block_linear", 64, 3072, 8192, BF16, {"scale_dtype": BF16}),  # attention, output
    ("fp8_block_linear", 8, 3072, 8192, F32, {}),
    ("fp8_row_linear", 3, 3072, 8192, BF16, {}),
    ("fp8_row_linear", 17, 2048, 4096, BF16, {"per_tensor": True}),  # 35B, attention output
    ("fp8_row_block_linear", 3, 40_960, 3072, BF16, {"scale_dtype": BF16, "out_dtype": F32}),  # a head for drafts
    ("nvfp4_linear", 1, 1024, 3072, BF16, {}),
    ("nvfp4_linear", 64, 1024, 3072, BF16, {}),
    ("nvfp4_linear", 3, 3072, 1024, F32, {}),
    ("bf16_linear", 3, 16384, 3072, BF16, {}),
    ("bf16_linear", 17, 3072, 8192, BF16, {}),
    ("bf16_linear", 64, 3072, 8192, F32, {}),
    ("bf16_linear", 3, 256, 3072, BF16, {"out_dtype": F32}),  # router
    ("bf16_linear", 3, 64, 3072, BF16, {}),  # DeltaNet, in_proj_a and in_proj_b
    # 122B, prefill
    ("fp8_block_matmul", 130, 2048, 3072, BF16, {"scale_dtype": BF16}),
    ("fp8_block_matmul", 512, 3072, 1024, BF16, {"scale_dtype": BF16}),
    ("fp8_block_matmul", 512, 3072, 8192, BF16, {"scale_dtype": BF16}),
    ("fp8_block_matmul", 130, 2048, 3072, F32, {}),
    ("fp8_row_matmul", 512, 3072, 8192, BF16, {}),
    ("nvfp4_matmul", 130, 1024, 3072, BF16, {}),
    ("nvfp4_matmul", 512, 3072, 1024, BF16, {}),
    ("bf16_matmul", 512, 16384, 3072, BF16, {}),
    ("bf16_matmul", 512, 256, 3072, BF16, {"out_dtype": F32}),
    ("bf16_matmul", 130, 64, 3072, BF16, {}),
    ("bf16_matmul", 130, 256, 3072, F32, {}),
]


def float_weight(kind: str, matrix: Tensor, device: torch.device) -> FloatWeight:
    """The float32 matrix [N, K] stored as `kind`."""
    if kind == "bf16":
        return FloatWeight(kind, matrix.to(torch.bfloat16).to(device), None)
    if kind == "nvfp4":
        packed, scale, multiplier = quantize_nvfp4(matrix, Dialect.MODELOPT)
        return FloatWeight(kind, packed.to(device), scale.view(torch.uint8).to(device), multiplier.to(device))
    quantize = quantize_fp8_block if kind == "block" else quantize_fp8_rows
    codes, scale = quantize(matrix, scale_dtype=torch.float32)
    return FloatWeight(kind, codes.view(torch.uint8).to(device), scale.to(device))


def _parts_inputs(
    device: torch.device, rows: int, width: int, kind: str, columns: int, dtype: torch.dtype, normed: bool
) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows + width))
    return {
        "rows": fixed_rows(rows, width, dtype, is_normed=normed).to(device),
        "weight": float_weight(kind, draw(columns, width) * width**-0.5, device),
    }


def _parts_case(
    rows: int,
    width: int,
    kind: str,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    normed: bool = True,
    is_full: bool = False,
) -> Case:
    make = partial(_parts_inputs, rows=rows, width=width, kind=kind, columns=columns, dtype=dtype, normed=normed)
    name = f"{rows}x{width}-{kind}{columns}-{dtype}-{'normed' if normed else 'plain'}"
    return Case("float_parts", name, make, is_full)


CASES = [
    *(
        _case(op, rows, n, k, dtype, is_full, **options)
        for inputs, is_full in ((_SMALL, False), (_FULL, True))
        for op, rows, n, k, dtype, options in inputs
    ),
    _parts_case(1, 256, "bf16", 9),
    _parts_case(1, 256, "block", 128),
    _parts_case(3, 512, "bf16", 33, torch.float32),
    _parts_case(3, 512, "row", 64, torch.float32),
    _parts_case(2, 512, "nvfp4", 40, normed=False),
    _parts_case(9, 384, "block", 200, normed=False),
    _parts_case(0, 128, "bf16", 8),
    _parts_case(33, 256, "block", 40),
    _parts_case(17, 256, "bf16", 33, torch.float32),
    _parts_case(20, 512, "nvfp4", 40),
    _parts_case(1, 3072, "bf16", 257, is_full=True),
    _parts_case(12, 3072, "bf16", 257, is_full=True),
    _parts_case(1, 3072, "block", 2048, is_full=True),
    _parts_case(12, 3072, "block", 2048, is_full=True),
    _parts_case(3, 1024, "block", 3072, normed=False, is_full=True),
    _parts_case(3, 2048, "bf16", 257, is_full=True),
    _parts_case(3, 2048, "nvfp4", 1024, is_full=True),
    *(_parts_case(96, 3072, kind, columns, is_full=True) for kind, columns in (("bf16", 257), ("block", 2048))),
    _parts_case(96, 3072, "nvfp4", 2048, is_full=True),
    _parts_case(32, 6144, "bf16", 3072, normed=False, is_full=True),  # mtp.fc
]
