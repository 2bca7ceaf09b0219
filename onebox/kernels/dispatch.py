"""Chooses the implementation of an operation by where its tensors are."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

__all__ = ["implementation"]


def implementation(package: str, tensor: Tensor) -> ModuleType:
    """The module of `package` (an operation's `__name__`) that computes on the device of `tensor`."""
    return _module(package, tensor.is_cuda)


@cache
def _module(package: str, is_cuda: bool) -> ModuleType:
    if is_cuda:
        return import_module(f"{package}.kernel")
    return import_module(f"{package}.{'cpu' if find_spec(f'{package}.cpu') else 'reference'}")
