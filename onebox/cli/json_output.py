"""`--json`: stdout is one JSON document, whatever else a command prints.

`OneboxCommand` turns what a command with the flag prints to stderr; `echo_json` alone writes to stdout.
"""

import contextlib
import contextvars
import json
import math
import sys
from collections.abc import Iterator
from typing import IO, Any

import typer

__all__ = ["JSON_NAME", "echo_json", "json_alone"]

JSON_NAME = "as_json"
"""The parameter of every command that has the flag."""
_stdout: contextvars.ContextVar[IO[str] | None] = contextvars.ContextVar("stdout", default=None)


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Prints go to stderr."""
    token = _stdout.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.reset(token)


def echo_json(value: Any, indent: int | None = None) -> None:
    """Numbers that JSON lacks, such as an infinite one, are null: programs could not read them."""
    typer.echo(json.dumps(_finite(value), indent=indent), file=_stdout.get() or sys.stdout)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _finite(held) for name, held in value.items()}
        case list() | tuple():
            return [_finite(held) for held in value]
    return value
