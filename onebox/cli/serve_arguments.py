"""The options with which `onebox up` serves: the recipe's, then those after `--`; checked before anything is done."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer
from typer.main import get_command

from onebox.cli.command import OneboxCommand
from onebox.cli.launch_line import read_launch_line
from onebox.cli.serve import serve
from onebox.cli.serve_options import HttpOptions, MediaOptions, MemoryOptions, ModelOptions, engine_options
from onebox.cli.settings import variable_name
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.engine.api import EngineOptions
    from onebox.setup.recipe_file import SetupRecipe

__all__ = ["ServeArguments"]

Group = TypeVar("Group")


@dataclass(frozen=True)
class ServeArguments:
    """The command line of `onebox serve` without its model, and what its options mean."""

    arguments: tuple[str, ...]
    values: dict[str, Any]

    @staticmethod
    def resolve(recipe: "SetupRecipe", given: Sequence[str]) -> "ServeArguments":
        """Of two values of one option the given one holds. Raises the error that `onebox serve` would, much later."""
        own = list(_recipe_arguments(recipe))
        try:
            _parse(own)
        except _WRONG_ARGUMENTS as error:
            raise UsageError(f"{recipe.path}: [serve]: {error.format_message()}") from None
        arguments = (*own, *_translated(given))
        values = _parse(arguments)
        if values["model"] is not None:
            raise UsageError(f"{values['model']} after `--` is no option of onebox serve; the recipe sets the model.")
        resolved = ServeArguments(arguments, values)
        resolved.engine_options()
        resolved.group(HttpOptions).settings()
        return resolved

    def group(self, kind: type[Group]) -> Group:
        """One group of options."""
        return kind(**{field.name: self.values[field.name] for field in dataclasses.fields(kind)})  # type: ignore[arg-type]

    def engine_options(self) -> "EngineOptions":
        return engine_options(self.group(ModelOptions), self.group(MemoryOptions), self.group(MediaOptions))

    def shell_text(self, model: Path) -> str:
        """The arguments as one would type them, without API keys."""
        shown = list(self.arguments)
        for place, argument in enumerate(shown):
            if argument == "--api-key" and place + 1 < len(shown):
                shown[place + 1] = "..."
            elif argument.startswith("--api-key="):
                shown[place] = "--api-key=..."
        return shlex.join([str(model), *shown])

    def serve(self, model: Path) -> NoReturn:
        """Becomes `onebox serve`, which starts without what the steps before it left in memory.

        Descriptors that are marked as inheritable stay open.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        command = [sys.executable, "-m", "onebox.cli.main", "serve", str(model), *self.arguments]
        os.execv(sys.executable, command)  # noqa: S606 - the arguments are this command's own


_WRONG_ARGUMENTS: Any = typer.BadParameter.__base__


def _command() -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=OneboxCommand)(serve)
    return get_command(app)


def _translated(given: Sequence[str]) -> list[str]:
    """The given words in our spelling; what they mean for nothing here is said, what cannot be honoured is refused."""
    takes_value = {
        name: not option.is_flag
        for option in _command().params
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    }
    line = read_launch_line(given, takes_value)
    if line.refusals:
        raise UsageError("\n".join(line.refusals))
    for notice in line.notices:
        typer.echo(notice)
    return line.arguments


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    with _command().make_context("onebox serve", list(arguments)) as context:
        return dict(context.params)


def _recipe_arguments(recipe: "SetupRecipe") -> Iterator[str]:
    options = {parameter.name: parameter for parameter in _command().params if parameter.param_type_name == "option"}
    for key, value in recipe.serve.items():
        if key not in options:
            raise UsageError(f"{recipe.path}: [serve] {key!r} is not an option of onebox serve.")
        if variable_name(options[key]) not in os.environ:  # the environment counts more than a file
            yield from _option_arguments(recipe.path, key, value, options[key])


def _option_arguments(path: Path, key: str, value: Any, option: Any) -> Iterator[str]:
    if isinstance(value, bool) != bool(option.is_flag):
        takes = "true or false" if option.is_flag else "a text or a number"
        raise UsageError(f"{path}: [serve] {key} is {value!r}; it takes {takes}.")
    if isinstance(value, bool):
        names = option.opts if value else option.secondary_opts
        yield from names[:1]
    elif isinstance(value, list) and option.multiple:
        for one in value:
            yield from (option.opts[0], str(one))
    elif isinstance(value, str | int | float):
        yield from (option.opts[0], str(value))
    else:
        raise UsageError(f"{path}: [serve] {key} is {value!r}; it takes a text or a number.")
