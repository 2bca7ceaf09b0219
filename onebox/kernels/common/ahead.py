"""Compiling kernels without launching them: what operations on `meta` tensors do in a process of its own.

A launch asks Triton for the kernel's machine code and stops there. Nothing touches a GPU, so that many processes can
compile at once, before a model is loaded, and for a GPU that is not there.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, NamedTuple

import triton
from triton.runtime.jit import JITFunction

from onebox.kernels.common.target import AbsentGpu, use_absent_gpu

__all__ = ["CompiledLaunch", "compile_only", "settle_cache_keys"]


def settle_cache_keys() -> None:
    """Has Triton compute the cache keys of all kernels in a fixed order, so that every process finds the same ones.

    Triton 3.6 leaves the globals of a called function out of its caller's key unless the function's own key was
    computed before: which key a kernel has, and so whether it is found in the cache, depends on what ran earlier.
    """
    package = import_module("onebox.kernels")
    found: dict[str, JITFunction[Any]] = {}
    for module in walk_packages(package.__path__, "onebox.kernels."):
        if not module.name.endswith((".cases", ".case")):
            own = vars(import_module(module.name)).values()
            found |= {f"{value.module}.{value.__name__}": value for value in own if isinstance(value, JITFunction)}
    for name in sorted(found):
        _ = found[name].cache_key


class CompiledLaunch(NamedTuple):
    """A launch whose kernel was compiled; `kernel` is Triton's CompiledKernel."""

    name: str
    kernel: Any


def compile_only(
    gpu: AbsentGpu,
    compiled: Callable[[CompiledLaunch], None],
    wants: Callable[[str], bool] = lambda _: True,
) -> None:
    """From now on launches in this process compile their kernels for `gpu`, and run nothing.

    `wants` is asked once for each kernel that would be compiled, by the key of its specialisation; `compiled` is called
    after each launch whose kernel was wanted.
    """
    use_absent_gpu(gpu)
    run, refused = JITFunction.run, set[str]()

    def refuse(*, key: str, fn: Any, **_: object) -> bool:
        """Whether Triton leaves this kernel alone; it asks before each compilation."""
        name = f"{fn.module}.{fn.name} {key}"
        if name not in refused and not wants(name):
            refused.add(name)
        return name in refused

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001 - always a warm-up
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None:
            compiled(CompiledLaunch(self.__name__, kernel))
        return kernel

    triton.knobs.runtime.jit_cache_hook = refuse
    JITFunction.run = launch
