"""Finds every operation, its forms and its cases."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import onebox.kernels
from onebox.kernels.common.case import Case
from onebox.kernels.common.dispatch import Operation


def packages() -> list[str]:
    """The packages under onebox.kernels that hold operations."""
    names = [item.name for item in iter_modules(onebox.kernels.__path__) if item.ispkg and item.name != "common"]
    return [f"onebox.kernels.{name}" for name in names]


@cache
def operations() -> dict[str, Operation]:
    """All operations by name."""
    offered = [
        getattr(import_module(package), name) for package in packages() for name in import_module(package).__all__
    ]
    return {operation.name: operation for operation in offered}


class forms:  # noqa: N801 - reads as a function: forms("kernel").rms_norm
    """All operations by name in one form: `reference` (the twins), `kernel` (host functions) or `cpu`."""

    def __init__(self, kind: str) -> None:
        self._attribute = {"reference": "twin", "kernel": "kernel", "cpu": "cpu"}[kind]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(operations()[name], self._attribute)


def cases() -> list[Case]:
    """The cases of all operations."""
    return [case for package in packages() for case in import_module(f"{package}.cases").CASES]
