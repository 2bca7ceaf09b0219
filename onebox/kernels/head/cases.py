"""Inputs of a head in two planes: every kind of row, several chunks of tokens, a padded last tile, blank rows."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.formats.head_planes import split_planes
from onebox.kernels.common.case import Case, generator
from onebox.kernels.head.reference import LowPlane
from onebox.kernels.int_linear.reference import fixed_point, int6_linear

__all__ = ["CASES", "HeadInputs", "head_inputs"]


class HeadInputs(NamedTuple):
    """A head's planes, and rows with their incomplete logits."""

    high: Tensor
    plane: LowPlane
    planes: Tensor
    scale: Tensor
    logits: Tensor


def head_inputs(num_rows: int, num_tokens: int, width: int, scale_dtype: torch.dtype = torch.float32) -> HeadInputs:
    """Rows that agree with some tokens more than with others, as a trained model's do."""
    draw = generator(num_rows + num_tokens + width)
    padded = -(-num_tokens // 16) * 16
    codes = (30 * torch.randn(padded, width, generator=draw)).round().clamp(-127, 127).to(torch.int8)
    signs = 1 - 2 * torch.randint(2, (num_tokens,), generator=draw)
    scales = (signs * (0.9 + 0.2 * torch.rand(num_tokens, generator=draw)) / width**0.5 / 30).to(scale_dtype)
    high, low, radius = split_planes(codes)
    meant = torch.randint(num_tokens, (num_rows, 3), generator=draw)
    strength = torch.tensor([0.5, 0.375, 0.25]).unsqueeze(1)
    agreeing = codes[meant].to(torch.float32) * signs[meant].unsqueeze(-1)
    x = (agreeing / 30 * strength).sum(1) + torch.randn(num_rows, width, generator=draw)
    planes, scale = fixed_point(2 * x)
    logits = int6_linear(planes, scale, high, scales)
    return HeadInputs(high, LowPlane(low, radius, scales), planes, scale, logits)


# Temperature and top_k of the rows, in turn.
_GREEDY, _COMMON, _PLAIN, _WIDE = (0.0, 0), (0.6, 20), (1.0, 0), (1.0, 65)


def _all(device: torch.device, shape: tuple[int, int, int]) -> dict[str, Any]:
    _, plane, planes, scale, logits = head_inputs(*shape)
    return {
        "logits": logits.to(device),
        "planes": planes.to(device),
        "scale": scale.to(device),
        "plane": LowPlane(*(tensor.to(device) for tensor in plane)),
    }


def _candidates(
    device: torch.device,
    shape: tuple[int, int, int],
    kinds: list[tuple[float, int]],
    num_blank: int | None,
    is_complete: bool,
) -> dict[str, Any]:
    num_rows = shape[0]
    limits = [kinds[row % len(kinds)] for row in range(num_rows)]
    counted = None if num_blank is None else torch.tensor([num_rows - num_blank], dtype=torch.int32).to(device)
    return {
        **_all(device, shape),
        "temperature": torch.tensor([limit[0] for limit in limits], dtype=torch.float64).to(device),
        "top_k": torch.tensor([limit[1] for limit in limits], dtype=torch.int64).to(device),
        "num_rows": counted,
        "is_complete": torch.tensor([int(is_complete)], dtype=torch.int32).to(device),
    }


def _candidates_case(
    name: str,
    shape: tuple[int, int, int],
    kinds: list[tuple[float, int]],
    num_blank: int | None = 0,
    is_complete: bool = False,
    is_full: bool = False,
) -> Case:
    make = partial(_candidates, shape=shape, kinds=kinds, num_blank=num_blank, is_complete=is_complete)
    sizes = "x".join(map(str, shape))
    return Case("complete_candidates", f"{name}-{sizes}", make, is_full, mutates=("logits",))


def _all_case(shape: tuple[int, int, int], is_full: bool = False) -> Case:
    make = partial(_all, shape=shape)
    return Case("complete_logits", "x".join(map(str, shape)), make, is_full, mutates=("logits",))


_HEAD = 2_048, 3_072
"""Tokens and width; a vocabulary has more tokens, in chunks of up to 256 instead of 16."""

CASES = [
    _all_case((1, 40, 128)),
    _all_case((18, 17, 256)),
    _all_case((0, 16, 128)),
    _candidates_case("greedy", (3, 100, 256), [_GREEDY]),
    _candidates_case("common", (2, 330, 128), [_COMMON], num_blank=None),
    _candidates_case("mixed", (5, 90, 128), [_GREEDY, _COMMON], num_blank=2),
    _candidates_case("wide", (2, 50, 128), [_WIDE]),
    _candidates_case("plain", (1, 50, 128), [_PLAIN]),
    _candidates_case("many", (19, 40, 128), [_GREEDY]),
    _candidates_case("done", (2, 40, 128), [_GREEDY], is_complete=True),
    _candidates_case("none", (0, 40, 128), [_GREEDY]),
    _all_case((40, *_HEAD), is_full=True),
    *(_candidates_case("common", (rows, *_HEAD), [_COMMON, _GREEDY], is_full=True) for rows in (3, 12)),
    _candidates_case("large", (3, 248_320, 128), [_COMMON, _GREEDY, _COMMON], num_blank=None, is_full=True),
]
