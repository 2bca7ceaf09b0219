"""Inputs of DeltaNet's step from parts: those of the step, cut into parts, gates in the projection or on their own."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onebox.kernels.case import Case, generator
from onebox.kernels.delta_net.cases import QWEN_122B, TINY, Layer, delta_inputs

__all__ = ["CASES"]


def _inputs(
    device: torch.device,
    layer: Layer,
    lengths: tuple[int, ...],
    keep: tuple[int, ...],
    parts: tuple[int, int],
    dtype: torch.dtype,
) -> dict[str, Any]:
    arguments = delta_inputs(device, layer, lengths, dtype, keep)
    qkv, a, b = (arguments.pop(name).to(torch.float32) for name in ("qkv", "a", "b"))
    heads = layer.num_heads
    if parts[0] == parts[1]:  # one projection for all of them
        joined = _cut(torch.cat([qkv, b, a], dim=1), parts[0])
        cut_qkv, cut_b, cut_a = joined.tensor_split([layer.conv_dim, layer.conv_dim + heads], dim=2)
    else:
        cut_qkv = _cut(qkv, parts[0])
        cut_b, cut_a = _cut(torch.cat([b, a], dim=1), parts[1]).tensor_split([heads], dim=2)
    return {"qkv_parts": cut_qkv, "a_parts": cut_a, "b_parts": cut_b, **arguments}


def _cut(whole: Tensor, count: int) -> Tensor:
    """Parts [count, R, N] of [R, N] that add up to nearly it."""
    noise = torch.randn(count, *whole.shape, generator=generator(count)).to(whole.device)
    return whole / count + noise - noise.mean(0)


def _case(
    name: str,
    layer: Layer,
    lengths: tuple[int, ...],
    keep: tuple[int, ...],
    parts: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_full: bool = False,
) -> Case:
    make = partial(_inputs, layer=layer, lengths=lengths, keep=keep, parts=parts, dtype=dtype)
    return Case("delta_step", f"{name}-{parts}-{dtype}", make, is_full, mutates=("pool",))


CASES = [
    _case("one-token", TINY, (1,), (0,), (1, 1)),
    _case("one-token-after-five", TINY, (1,), (5,), (3, 3), torch.float32),
    _case("mixed", TINY, (1, 3, 0, 2), (2, 0, 3, 1), (2, 4)),
    _case("122b-one-row", QWEN_122B, (1,), (1,), (3, 3), is_full=True),
    _case("122b-4x3-rows", QWEN_122B, (3, 3, 3, 3), (3, 1, 2, 0), (3, 3), is_full=True),
    _case("122b-own-gates", QWEN_122B, (2,), (1,), (3, 12), torch.float32, is_full=True),
]
