"""The launch of elementwise kernels: one program per row and block of columns."""

import triton

__all__ = ["ELEMENTWISE_BLOCK", "elementwise_grid"]

ELEMENTWISE_BLOCK = 1024
"""Columns per program: 8 bfloat16 values, one 16-byte load, per lane of its four warps."""


def elementwise_grid(rows: int, width: int) -> tuple[int, int]:
    """The grid over rows [rows, width]."""
    return rows, triton.cdiv(width, ELEMENTWISE_BLOCK)
