"""Grouped options: a command takes a few frozen dataclasses where typer wants one parameter for each option.

    @option_group("Server")
    class ConnectionOptions:
        url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000"

    @app.command()
    @grouped
    def run(server: ConnectionOptions, runs: Annotated[int, typer.Option()] = 3) -> None: ...

Typer sees one option per field: name, type, help and default are the field's, and `--help` lists the group under its
heading. A parameter's own default, `server: ConnectionOptions = ConnectionOptions(url="...")`, gives
that command other defaults.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from onebox.spec.errors import UsageError

__all__ = ["grouped", "json_option", "option_group"]

Group = TypeVar("Group")
_PANEL = "_help_panel"


@dataclass_transform(frozen_default=True)
def option_group(heading: str) -> Callable[[type[Group]], type[Group]]:
    """Makes a class a frozen dataclass whose fields are options, listed under `heading`."""

    def decorate(group: type[Group]) -> type[Group]:
        setattr(group, _PANEL, heading)
        return dataclass(frozen=True)(group)

    return decorate


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every option group among its parameters replaced by one keyword parameter for each field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    expanded: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if hasattr(annotation, _PANEL):
            groups[parameter.name] = annotation
            expanded += _field_parameters(annotation, parameter.default)
        else:
            expanded.append(_keyword(parameter.name, annotation, parameter.default))

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
        option.rich_help_panel = getattr(group, _PANEL)
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if defaults is not inspect.Parameter.empty:
            default = getattr(defaults, field.name)
        yield _keyword(field.name, Annotated[kind, option], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def json_option(flag: str, text: str, kind: type) -> Any:
    """The value of an option that takes JSON: an object (dict) or a list."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        why = "it has typographic quotes, write straight ones" if set(text) & set("“”‘’") else str(error)
        raise UsageError(f"{flag} is not JSON ({why}).") from None
    if not isinstance(given, kind):
        raise UsageError(f"{flag} must be a JSON {'object' if kind is dict else 'list'}, not {text}.")
    return given
