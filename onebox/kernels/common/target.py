"""The GPU that kernels are compiled for; it need not be in the machine (`ahead.py`)."""

from functools import cache

import torch
import triton
from triton.backends.compiler import GPUTarget

__all__ = ["AbsentGpu", "gpu_name", "has_dependent_launch", "has_large_shared_memory", "use_absent_gpu"]

# Compute capabilities with 227 KB of shared memory per program; others that Triton supports have 99 to 163 KB.
_LARGE = (90, 100, 101, 103)


class AbsentGpu:
    """What Triton asks of a driver in order to compile: a GPU by its compute capability (90, 121) and its name."""

    def __init__(self, capability: int, name: str = "") -> None:
        self.capability = capability
        self.name = name

    @classmethod
    def of_this_machine(cls) -> "AbsentGpu":
        """The machine's own, for processes that must not touch it."""
        major, minor = torch.cuda.get_device_capability()
        return cls(10 * major + minor, torch.cuda.get_device_name())

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached by device, so each target is its own

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


_absent: AbsentGpu | None = None


def has_large_shared_memory() -> bool:
    """Whether a program may use more than 99 KB. Using it changes a kernel's speed, never its result."""
    if triton.knobs.runtime.interpret:
        return False
    return triton.runtime.driver.active.get_current_target().arch in _LARGE


def has_dependent_launch() -> bool:
    """Whether a kernel may start before the previous one has ended (`dependent.py`)."""
    if triton.knobs.runtime.interpret:
        return False
    return _has_dependent_launch(triton.runtime.driver.active.get_current_device())


@cache
def _has_dependent_launch(device: int) -> bool:  # noqa: ARG001 - the current one; it is what the result is cached by
    return bool(triton.runtime.driver.active.get_current_target().arch >= 90)


def gpu_name() -> str | None:
    """The name of the GPU that kernels are compiled for, if there is one."""
    if _absent:
        return _absent.name
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def use_absent_gpu(gpu: AbsentGpu) -> None:
    """Compiles for this GPU from now on, without asking for the machine's own."""
    global _absent  # as global as Triton's active driver
    _absent = gpu
    triton.runtime.driver.set_active(gpu)
