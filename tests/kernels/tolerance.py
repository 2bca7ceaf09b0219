"""The one tolerance table: the largest difference allowed, relative to the largest magnitude in the twin's tensor.

A result that went through the dtype carries its rounding (half a unit in the last place of the largest value); the rest
is the order of summation. Nothing loosens it: not a device, not a format, not an environment variable.

Fixed-point rows are codes of floats: a float that lies between two steps may be rounded to either, so their codes are
at most one step apart.
"""

from typing import Any

import torch

from onebox.kernels.common.rows import FixedRows

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_same(found: Any, expected: Any, what: str = "result") -> None:
    """Floats within the table, everything else equal; tuples, lists and dicts part by part."""
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected, what)
    elif isinstance(expected, FixedRows):
        assert_same((found.x, found.scale, found.squares), (expected.x, expected.scale, expected.squares), what)
        apart = (_steps(found.planes) - _steps(expected.planes)).abs()
        assert not apart.numel() or int(apart.max()) <= 1, f"{what} has codes {int(apart.max())} steps apart"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key in expected:
            assert_same(found[key], expected[key], f"{what}[{key}]")
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected), what
        for index, part in enumerate(expected):
            assert_same(found[index], part, f"{what}[{index}]")
    else:
        assert found == expected, what


def _steps(planes: torch.Tensor) -> torch.Tensor:
    high, low = planes.cpu().to(torch.int32).unbind(1)
    return 256 * high + low


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, (
        f"{what} has shape {list(found.shape)} where {list(expected.shape)} is expected"
    )
    assert found.dtype == expected.dtype, f"{what} has dtype {found.dtype} where {expected.dtype} is expected"
    if expected.dtype not in TOLERANCE:
        assert torch.equal(found.cpu(), expected.cpu()), f"{what} differs"
        return
    a, b = found.cpu().to(torch.float32), expected.cpu().to(torch.float32)
    assert bool(torch.isfinite(a).all() == torch.isfinite(b).all()), f"{what} is not finite where the twin is"
    if a.numel():
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        assert error <= TOLERANCE[expected.dtype], f"{what} is off by {error:.2e} of its largest value"
