"""An operation: the twin's signature, and an implementation chosen by the device of the tensors."""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["Operation", "uses_kernels"]

P = ParamSpec("P")
T = TypeVar("T")

KERNEL_DEVICES = {"cuda", "meta"}
"""`meta` stands for a GPU. A test adds the CPU, whose twins then compute all that a GPU does, step by step."""


def uses_kernels(device: torch.device) -> bool:
    """Whether models on this device have what the kernels take: weights as stored, fused layers, blank rows.

    Elsewhere, on a CPU, weights are plain numbers and every batch has its own shape.
    """
    return device.type in KERNEL_DEVICES


class Operation(Generic[P, T]):
    """Calls the Triton kernel for CUDA tensors, else the CPU form or the twin; all have the twin's name and signature.

    Tensors on `meta` go to the kernel too, which is then compiled and not launched (`ahead.py`).

    The twin is the definition. Kernel modules import Triton, so they are imported at the first call with a CUDA tensor.
    """

    def __init__(
        self,
        twin: Callable[P, T],
        kernel: str,
        cpu: str | None = None,
        checks: tuple[Callable[..., None], ...] = (),
        name: str | None = None,
    ) -> None:
        """`kernel` and `cpu` are names of modules in the twin's folder. A check gets the arguments in its signature.

        Two operations may share a twin; the second then has its own name, which is also that of its host function.
        """
        self.twin = twin
        self.name = name or twin.__name__
        self.package = twin.__module__.rpartition(".")[0]
        self.has_cpu_form = cpu is not None
        self.__doc__ = twin.__doc__
        self._kernel_module = kernel
        self._cpu_module = cpu
        self._parameters = list(signature(twin).parameters)
        self._checks = [(check, list(signature(check).parameters)) for check in checks]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._checks:
            given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            for check, names in self._checks:
                check(*(given[name] for name in names))
        chosen = self.kernel if _is_on_gpu(args, kwargs) else self.cpu
        return chosen(*args, **kwargs)

    @cached_property
    def kernel(self) -> Callable[P, T]:
        """The host function of the Triton kernel."""
        return self._find(self._kernel_module)

    @cached_property
    def cpu(self) -> Callable[P, T]:
        """The CPU form if there is one, else the twin."""
        return self._find(self._cpu_module) if self._cpu_module else self.twin

    def _find(self, module: str) -> Callable[P, T]:
        found: Callable[P, T] = getattr(import_module(f"{self.package}.{module}"), self.name)
        return found


def _is_on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first tensor, or first in a tuple of tensors, is on a GPU or stands for one on a GPU (`meta`).

    An operation's tensors share a device.
    """
    for value in (*args, *kwargs.values()):
        first = value[0] if isinstance(value, tuple) else value
        if isinstance(first, Tensor):
            return first.is_cuda or first.is_meta
    raise TypeError("An operation was called without a tensor.")
