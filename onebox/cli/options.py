"""Grouped options: a command takes a few frozen dataclasses where typer wants one parameter for each option.

    @dataclass(frozen=True)
    class ConnectionOptions:
        PANEL: ClassVar[str] = "Server"
        url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000"

    @app.command()
    @grouped
    def run(server: ConnectionOptions, runs: Annotated[int, typer.Option()] = 3) -> None: ...

Typer sees one option per field: name, type, help and default are the field's, and `PANEL` is the heading under which
`--help` lists the group. A parameter's own default, `server: ConnectionOptions = ConnectionOptions(url="...")`, gives
that command other defaults.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

__all__ = ["grouped"]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every dataclass parameter replaced by one keyword parameter for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    expanded: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if is_dataclass(annotation):
            groups[parameter.name] = annotation
            expanded += _field_parameters(annotation, parameter.default)
        else:
            default = parameter.default
            expanded.append(_keyword(parameter.name, annotation, default))

    @wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    call.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    return call


def _field_parameters(group: Any, defaults: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        option = copy.copy(option)
        option.rich_help_panel = group.PANEL
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if defaults is not inspect.Parameter.empty:
            default = getattr(defaults, field.name)
        yield _keyword(field.name, Annotated[kind, option], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
