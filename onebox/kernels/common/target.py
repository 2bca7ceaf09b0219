"""What the GPU that kernels are compiled for has room for; in tests it is not the machine's own."""

import triton

__all__ = ["has_large_shared_memory"]

# Compute capabilities with 227 KB of shared memory for a program; others that Triton supports have 99 to 163 KB.
_LARGE = (90, 100, 101, 103)


def has_large_shared_memory() -> bool:
    """Whether a program may take more than 99 KB. What it then keeps there changes its speed, never its result."""
    if triton.knobs.runtime.interpret:
        return False
    return triton.runtime.driver.active.get_current_target().arch in _LARGE
