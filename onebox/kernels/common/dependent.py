"""Dependent launch: a kernel starts while the previous one still runs, and waits for it only where it must.

A decode step is hundreds of kernels of a few microseconds each; starting a kernel while its predecessor ends, with the
loads of its weights already in flight, saves one microsecond per kernel. The rules for correct results:

- A kernel launched early calls `wait` in every program before it writes, or reads what a kernel of the step wrote.
  After `wait` all earlier kernels have ended and their writes are visible, because each of them waited too.
- `release` lets the programs of the next kernel start. Before their own `wait` they may load only weights and data that
  was complete before the step began: the step's inputs, and states written by the previous step.
- A kernel launched normally, as torch's are, starts when all earlier ones have ended, and ends before any later one.
  So are those that make a pass's inputs within a step (`rotary_table`, `following_rows`, `chain_rows`, `block_rows`):
  that is why later kernels may load rows, slots and lengths before their `wait`.

Neither changes a bit of a result. GPUs before SM90 and the interpreter have no such launch: there both do nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onebox.kernels.common.target import has_dependent_launch
from onebox.kernels.common.tuning import Tunable

__all__ = ["launch_options", "release", "wait"]


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Waits until all writes of earlier kernels are visible."""
    if DEPENDENT > 0:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Lets the next kernel start now if DEPENDENT is 1; otherwise it starts when this one has ended."""
    if DEPENDENT == 1:
        gdc_launch_dependents()


def launch_options(kernel: Tunable, shape: object, **default: int) -> dict[str, int | bool]:
    """Launch options of a kernel with the constexpr DEPENDENT; `default` has its others.

    DEPENDENT is 0: launched when the previous kernel has ended; 1: launched early; 2: launched early without letting
    the next kernel start early, because programs that only wait occupy resources that others could use.
    """
    options: dict[str, int | bool] = {**kernel.options(shape, {"dependent": 1, **default})}
    mode = options.pop("dependent")
    if triton.knobs.runtime.interpret:
        return {**options, "DEPENDENT": 0}
    if not has_dependent_launch():
        mode = 0
    return {**options, "DEPENDENT": mode, "launch_pdl": mode > 0}
