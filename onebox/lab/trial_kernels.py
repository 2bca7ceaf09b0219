"""Compiles the kernels that `onebox tune` tries, in parallel processes, before any of them is timed.

One after the other they would take most of the tuning's time. What is combined only as the search goes on is compiled
then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from onebox.kernels.common.target import AbsentGpu
from onebox.kernels.common.tuning import MODES, LaunchOptions, Tunable, launched, set_options

__all__ = ["StepLaunches", "option_sets"]

Options = dict[str, LaunchOptions]
"""Launch options by table key."""


@dataclass(frozen=True)
class StepLaunches:
    """A `CompileJob` of the kernels of some steps, under all options that are tried of each."""

    steps: tuple[Callable[[], None], ...]
    """Each makes the launches of a kind of step on `meta`."""
    options: Options
    """What is known already."""
    gpu: AbsentGpu

    def launch(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                set_options(self.options)
                launched(forget=True)
                step()
                for options in option_sets(launched(), self.options):
                    set_options(options)
                    step()


def option_sets(kernels: dict[str, Tunable], known: Options) -> Iterator[Options]:
    """Options for all kernels at once, so that each kernel has each of its candidates in some set, under each mode.

    A kernel with fewer candidates than others keeps what is known in the sets that remain.
    """
    others = {key: [option for option in kernel.tried if option not in MODES] for key, kernel in kernels.items()}
    most = max(map(len, others.values()), default=0)
    for place, mode in product(range(-1, most), MODES):
        found = dict(known)
        for key, kernel in kernels.items():
            own = others[key][place] if 0 <= place < len(others[key]) else {}
            found[key] = {**known.get(key, {}), **own, **(mode if mode in kernel.tried else {})}
        yield found
