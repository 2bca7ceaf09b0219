"""Chooses the implementation of an operation by where its tensors are."""

from importlib import import_module
from types import ModuleType

from torch import Tensor

__all__ = ["implementation"]


def implementation(package: str, tensor: Tensor) -> ModuleType:
    """The module of `package` (an operation's `__name__`) that computes on the device of `tensor`."""
    return import_module(f"{package}.{'kernel' if tensor.is_cuda else 'reference'}")
