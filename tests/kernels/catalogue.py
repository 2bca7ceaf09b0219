"""Finds every operation's cases."""

from importlib import import_module
from pkgutil import iter_modules

import onebox.kernels
from onebox.kernels.case import Case


def operations() -> list[str]:
    """The packages under onebox.kernels that are operations."""
    return [f"onebox.kernels.{item.name}" for item in iter_modules(onebox.kernels.__path__) if item.ispkg]


def cases() -> list[tuple[str, Case]]:
    """(package, case) of all operations."""
    return [(package, case) for package in operations() for case in import_module(f"{package}.cases").CASES]
