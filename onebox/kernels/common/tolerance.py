"""The one tolerance table, and how a kernel's result is compared with its twin's, element by element.

An element b of the twin's tensor may differ by TOLERANCE[dtype] * min(|b| + scale, largest |b| of the tensor), where
scale is the root mean square of b's row (the last dimension). |b| covers the rounding to the dtype: one unit in the
last place is at most 2^-7 |b| in bfloat16 and 2^-10 |b| in float16. scale covers the order of summation: a sum's error
depends on the size of its terms, which the row shows and a single small element does not. So neither a large element
nor a large row hides an error elsewhere. Nothing loosens this: no device, no format, no environment variable.

The operations in MIXERS sum over tokens, and a whole row can cancel: the sum is then much smaller than its terms, which
have the size of the tensor's other rows. For these, scale is the largest root mean square of a row of the tensor.

Worst error over (|b| + scale), all small cases, interpreter and CPU forms (2026-11-16):

| | limit | all but mixers, rms of the row | mixers, rms of the row | mixers, largest rms of a row |
|---|---|---|---|---|
| float32 | 2e-5 | 1.4e-6 | 1.3e-4 (delta_net_prefill) | 4.5e-6 |
| bfloat16 | 8e-3 | 6.0e-3 | 6.9e-3 (paged_attention) | 5.1e-3 |
| bfloat16, without one unit in the last place | 8e-3 | 7.6e-4 | 6.7e-3 (paged_attention) | 2.9e-3 |

Fixed-point rows are codes of floats: a float that lies between two steps may be rounded to either, so their codes are
at most one step apart. Where a twin's codes are those of its rounded x, a kernel's must be those of its own: a group's
scale is its largest x, which in bfloat16 may be a unit in the last place away.
"""

from typing import Any

import torch

from onebox.kernels.common.rows import FixedRows, to_fixed_point

__all__ = ["MIXERS", "TOLERANCE", "assert_same"]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MIXERS = frozenset(
    {
        "block_attention",
        "block_attention_fused",
        "delta_net_prefill",
        "delta_net_step",
        "delta_net_step_fused",
        "paged_attention",
        "paged_attention_fused",
        "paged_attention_prefill",
    }
)


def assert_same(found: Any, expected: Any, what: str = "result", operation: str = "") -> None:
    """Floats within the table, everything else equal; tuples, lists and dicts part by part."""
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected, what, operation)
    elif isinstance(expected, FixedRows):
        assert_same((found.x, found.squares), (expected.x, expected.squares), what, operation)
        codes, scale = expected.planes, expected.scale
        if torch.equal(to_fixed_point(expected.x)[1], scale):
            codes, scale = to_fixed_point(found.x)
        assert_same(found.scale, scale, f"{what}.scale", operation)
        apart = (_steps(found.planes) - _steps(codes)).abs()
        if apart.numel() and int(apart.max()) > 1:
            raise AssertionError(f"{what} has codes {int(apart.max())} steps apart")
    elif isinstance(expected, dict):
        _require(found.keys() == expected.keys(), what)
        for key in expected:
            assert_same(found[key], expected[key], f"{what}[{key}]", operation)
    elif isinstance(expected, tuple | list):
        _require(len(found) == len(expected), what)
        for index, part in enumerate(expected):
            assert_same(found[index], part, f"{what}[{index}]", operation)
    else:
        _require(found == expected, f"{what} is {found} where {expected} is expected")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _steps(planes: torch.Tensor) -> torch.Tensor:
    high, low = planes.cpu().to(torch.int32).unbind(1)
    return 256 * high + low


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, what: str, operation: str) -> None:
    shapes = [list(each.shape) for each in (found, expected)]
    _require(shapes[0] == shapes[1], f"{what} has shape {shapes[0]} where {shapes[1]} is expected")
    _require(found.dtype == expected.dtype, f"{what} has dtype {found.dtype} where {expected.dtype} is expected")
    if expected.dtype not in TOLERANCE:
        _require(torch.equal(found.cpu(), expected.cpu()), f"{what} differs")
        return
    a, b = (torch.atleast_1d(tensor.cpu().to(torch.float32)) for tensor in (found, expected))
    are_alike = torch.equal(torch.isfinite(a), torch.isfinite(b))
    _require(are_alike, f"{what} is not finite where the twin is, or the reverse")
    error = torch.where(a == b, 0.0, (a - b).abs())
    allowed = TOLERANCE[expected.dtype] * _magnitudes(b, is_mixer=operation in MIXERS)
    if bool((error <= allowed).all()):
        return
    excess = torch.nan_to_num(error / allowed, nan=torch.inf)
    index = [int(place) for place in torch.unravel_index(excess.argmax(), b.shape)]
    raise AssertionError(
        f"{what} is {float(a[*index]):.6g} at {index} where {float(b[*index]):.6g} is expected: "
        f"{float(excess.max()):.2f} times the difference that is allowed"
    )


def _magnitudes(b: torch.Tensor, *, is_mixer: bool) -> torch.Tensor:
    """What the tolerance of each element of b is relative to."""
    if not b.numel():
        return b
    b = torch.nan_to_num(b, nan=0.0, posinf=0.0, neginf=0.0)
    scale = b.square().mean(-1, keepdim=True).sqrt()
    if is_mixer:
        scale = scale.max()
    return torch.minimum(b.abs() + scale, b.abs().max()).clamp(min=1e-30)
