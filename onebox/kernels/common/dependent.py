"""Dependent launch: a kernel starts while the one before it still runs, and waits for it where it must.

A decode step is hundreds of kernels of a few microseconds; starting each while its predecessor ends, with its weights
already asked for, saves one of them each. The rules that keep it right:

- A kernel launched so calls `wait` in every program that goes on to write, or to read what a kernel of the step wrote,
  before it does. Waiting means: all earlier kernels have ended and their writes are seen, as each of them waited.
- `release` lets the next kernel's programs start. What they may do before their own `wait` is load weights, and what
  was complete before the step began: its inputs, and states that the step before it left.
- A kernel that is launched plainly, as torch's are, starts when all before it have ended, and ends before any other.

Neither changes a bit of a result. GPUs before SM90 and the interpreter have no such launch: there both do nothing.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onebox.kernels.common.tuning import Tunable

__all__ = ["launch_options", "release", "wait"]


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """All that earlier kernels wrote is there."""
    if DEPENDENT > 0:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """The next kernel may start; where the kernel was told to keep quiet it may when this one has ended."""
    if DEPENDENT == 1:
        gdc_launch_dependents()


def launch_options(tensor: Tensor, kernel: Tunable, shape: object, **default: int) -> dict[str, int | bool]:
    """The launch options of a kernel with the constexpr DEPENDENT, on the device of `tensor`; `default` are its others.

    DEPENDENT is 0, launched when the kernel before has ended; 1, launched early; or 2, launched early without letting
    the next one start early: programs that only wait hold places that others could use.
    """
    options: dict[str, int | bool] = {**kernel.options(shape, {"dependent": 1, **default})}
    mode = options.pop("dependent")
    if triton.knobs.runtime.interpret:
        return {**options, "DEPENDENT": 0}
    if tensor.is_cuda and not _is_able(tensor.device.index):
        mode = 0
    return {**options, "DEPENDENT": mode, "launch_pdl": mode > 0}


@cache
def _is_able(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)
