"""Shared memory of the GPU that kernels are compiled for; in tests this is not the machine's own GPU."""

import triton

__all__ = ["has_large_shared_memory"]

# Compute capabilities with 227 KB of shared memory per program; others that Triton supports have 99 to 163 KB.
_LARGE = (90, 100, 101, 103)


def has_large_shared_memory() -> bool:
    """Whether a program may use more than 99 KB. Using it changes a kernel's speed, never its result."""
    if triton.knobs.runtime.interpret:
        return False
    return triton.runtime.driver.active.get_current_target().arch in _LARGE
