"""Sizes of launches: the host's part of a kernel is called hundreds of times a step, so it is plain Python."""

__all__ = ["ELEMENTWISE_BLOCK", "ceil_div", "divisor", "elementwise_grid", "next_power_of_2"]

ELEMENTWISE_BLOCK = 1024
"""Columns per program: 8 bfloat16 values, one 16-byte load, per lane of its four warps."""


def ceil_div(count: int, size: int) -> int:
    """Programs of `size` that cover `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()


def divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`."""
    return max(count for count in range(1, at_most + 1) if number % count == 0)


def elementwise_grid(rows: int, width: int) -> tuple[int, int]:
    """The grid over rows [rows, width] of elementwise kernels: one program per row and block of columns."""
    return rows, ceil_div(width, ELEMENTWISE_BLOCK)
