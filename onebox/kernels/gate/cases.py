"""Inputs of the gates: odd widths, one row, none, large logits, the published sizes."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]

# (rows, width, dtype, is_full): the width is Q*D of the attention gate, I of SwiGLU, H of the shared expert.
_SMALL = [
    (1, 64, torch.bfloat16, False),
    (3, 200, torch.float32, False),
    (2, 1100, torch.bfloat16, False),
    (0, 64, torch.bfloat16, False),
]
_FULL = {
    "attention_gate": [(3, 32 * 256, torch.bfloat16, True), (512, 16 * 256, torch.bfloat16, True)],
    "swiglu": [(3, 1024, torch.bfloat16, True), (512, 512, torch.float32, True)],
    "add_shared": [(3, 3072, torch.bfloat16, True), (512, 2048, torch.float32, True)],
}
_NUM_HEADS = 4


def _inputs(device: torch.device, op: str, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = partial(torch.randn, generator=generator(rows * width))
    # Logits wide enough that some sigmoids are all but 0 and 1.
    wide = 12 * draw(rows, width)
    arguments: dict[str, Any]
    if op == "attention_gate":
        heads = (rows, _NUM_HEADS, width // _NUM_HEADS)
        arguments = {"attended": draw(*heads).to(dtype), "gate": wide.view(heads).to(dtype)}
    elif op == "swiglu":
        arguments = {"gate_up": torch.cat([wide, draw(rows, width)], dim=-1).to(dtype)}
    else:
        arguments = {
            "routed": draw(rows, width),
            "shared": draw(rows, width).to(dtype),
            # One column of a wider projection, as a router with the shared expert's gate appended gives it.
            "shared_gate_logit": wide[:, :5].to(dtype).to(device)[:, 4],
        }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _case(op: str, rows: int, width: int, dtype: torch.dtype, is_full: bool) -> Case:
    make = partial(_inputs, op=op, rows=rows, width=width, dtype=dtype)
    return Case(op, f"{rows}x{width}-{dtype}", make, is_full)


CASES = [_case(op, *shape) for op, full in _FULL.items() for shape in _SMALL + full]
