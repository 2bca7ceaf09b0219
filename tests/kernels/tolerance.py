"""The one tolerance table: the largest difference allowed, relative to the largest magnitude in the twin's tensor.

A result that went through the dtype carries its rounding (half a unit in the last place of the largest value); the rest
is the order of summation. Nothing loosens it: not a device, not a format, not an environment variable.
"""

from typing import Any

import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_same(found: Any, expected: Any, what: str = "result") -> None:
    """Floats within the table, everything else equal; tuples, lists and dicts part by part."""
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected, what)
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
