"""Inputs of the head: numbers whose every sum is exact, so that ties are many and ids compare; and ordinary ones."""

from functools import partial
from typing import Any

import torch

from onebox.formats.fragments import TILE_ROWS, to_fragments
from onebox.kernels.case import Case, generator
from onebox.kernels.int_linear.cases import activations, matrix
from onebox.kernels.int_linear.reference import fixed_point

__all__ = ["CASES", "exact_head", "head"]


def exact_head(rows: int, vocabulary: int, depth: int) -> dict[str, torch.Tensor]:
    """Small integers and scales that are powers of two: no order of summation rounds, and many logits are equal."""
    source = generator(rows + vocabulary + depth)
    padded = -(-vocabulary // TILE_ROWS) * TILE_ROWS
    codes = torch.randint(-3, 4, (padded, depth), generator=source, dtype=torch.int8)
    planes = torch.randint(-2, 3, (rows, 2, depth), generator=source, dtype=torch.int8)
    planes[:, 0] *= torch.rand(planes[:, 0].shape, generator=source) < 0.1
    if rows:
        planes[rows // 2] = 0  # every logit is 0: the answer is the lowest ids
    return {
        "planes": planes,
        "scale": torch.full((rows, depth // 128), 2.0**-9),
        "weight": to_fragments(codes, 8),
        "weight_scale": torch.full((vocabulary,), 2.0**-3, dtype=torch.bfloat16),
    }


def head(rows: int, vocabulary: int, depth: int) -> dict[str, torch.Tensor]:
    """Fixed-point rows and an INT8 matrix as `onebox.kernels.int_linear` is tested with."""
    planes, scale = fixed_point(activations(rows, depth, torch.float32))
    weight, weight_scale = matrix(vocabulary, depth, 8, torch.bfloat16)
    return {"planes": planes, "scale": scale, "weight": weight, "weight_scale": weight_scale}


def _inputs(
    device: torch.device, rows: int, vocabulary: int, depth: int, k: int | None, is_exact: bool
) -> dict[str, Any]:
    tensors = (exact_head if is_exact else head)(rows, vocabulary, depth)
    arguments: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
    return arguments if k is None else {**arguments, "k": k}


def _case(
    op: str,
    rows: int,
    vocabulary: int,
    depth: int,
    k: int | None = None,
    is_exact: bool = True,
    is_full: bool = False,
) -> Case:
    make = partial(_inputs, rows=rows, vocabulary=vocabulary, depth=depth, k=k, is_exact=is_exact)
    name = f"{rows}x{vocabulary}x{depth}{'' if k is None else f'-top{k}'}{'-exact' if is_exact else ''}"
    return Case(op, name, make, is_full)


CASES = [
    _case("logits_head", 2, 37, 256, is_exact=False),
    _case("greedy_head", 1, 17, 128),
    _case("greedy_head", 5, 90, 256),
    _case("greedy_head", 3, 64, 384, is_exact=False),
    _case("greedy_head", 18, 150, 128),
    _case("greedy_head", 0, 32, 128),
    _case("top_k_head", 3, 90, 256, k=20),
    _case("top_k_head", 1, 64, 128, k=64),
    _case("top_k_head", 2, 100, 256, k=1, is_exact=False),
    # An eighth of the published vocabulary: its size is not a constant of the kernels, its depth is.
    _case("logits_head", 3, 31040, 3072, is_exact=False, is_full=True),
    _case("greedy_head", 1, 31040, 3072, is_exact=False, is_full=True),
    _case("greedy_head", 8, 31033, 3072, is_full=True),
    _case("greedy_head", 17, 31040, 2048, is_full=True),
    _case("greedy_head", 64, 31040, 3072, is_full=True),
    _case("top_k_head", 1, 31040, 3072, k=20, is_exact=False, is_full=True),
    _case("top_k_head", 8, 31033, 3072, k=64, is_full=True),
]
