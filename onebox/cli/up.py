"""`onebox up`: from a bare box to a served model: check, fetch, build, verify, warm, serve; what is done is skipped."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.progress import byte_progress
from onebox.spec.errors import OneboxError

if TYPE_CHECKING:
    from onebox.cli.serve_arguments import ServeArguments
    from onebox.setup.steps import Setup, SetupStep

__all__ = ["up"]

_STEPS = "check, fetch, build, verify, warm or serve"


def up(
    model: Annotated[str, typer.Argument(help="A model that has a recipe, such as qwen3.5-122b-a10b.")],
    serve_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SERVE_OPTIONS", help="Options of `onebox serve`, after `--`."),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="The recipe: hybrid, another one that ships for the model, or a file NAME.toml.")
    ] = "hybrid",
    directory: Annotated[Path, typer.Option("--dir", help="Where sources and the built checkpoint go.")] = Path(
        "models"
    ),
    until: Annotated[str, typer.Option(help=f"The last step to do: {_STEPS}.")] = "serve",
    no_serve: Annotated[bool, typer.Option("--no-serve", help="The same as --until warm.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps, which are done, and what the others would take.")
    ] = False,
) -> None:
    """Go from a bare box to a served model by a recipe: check, fetch, build, verify, warm, serve.

    Steps that are done are skipped; a run that was stopped, however it was, is resumed by the same command.
    """
    from onebox.cli.serve_arguments import ServeArguments
    from onebox.setup.place import SetupPlace
    from onebox.setup.recipe_file import find_recipe
    from onebox.setup.steps import Setup, SetupStep

    chosen = find_recipe(model, recipe)
    last = _last_step(until, no_serve=no_serve)
    arguments = ServeArguments.resolve(chosen, serve_arguments or [])
    place = SetupPlace(directory, chosen)
    will_serve = last is SetupStep.SERVE
    setup = Setup(place, arguments.engine_options(), byte_progress, typer.echo, will_serve=will_serve)
    typer.echo(f"{chosen.model}, recipe {chosen.name}" + (f": {chosen.summary}" if chosen.summary else ""))
    if dry_run:
        _show(setup, arguments, last)
        return
    with place.locked() as name_step:
        setup.tidy()
        _do(setup, arguments, last, name_step)


def _last_step(until: str, *, no_serve: bool) -> "SetupStep":
    from onebox.setup.steps import SetupStep

    try:
        last = SetupStep(until)
    except ValueError:
        raise typer.BadParameter(f"{until!r} is not a step; give {_STEPS}", param_hint="--until") from None
    return SetupStep.WARM if no_serve and last is SetupStep.SERVE else last


def _steps(last: "SetupStep") -> "list[SetupStep]":
    from onebox.setup.steps import SetupStep

    steps = list(SetupStep)
    return steps[: steps.index(last) + 1]


def _show(setup: "Setup", arguments: "ServeArguments", last: "SetupStep") -> None:
    """The steps and what is left of each. A refusal by the first is shown, and the exit code is 1."""
    from onebox.setup.steps import SetupStep

    refused = False
    for step in _steps(last):
        try:
            if step is SetupStep.CHECK:
                _line(step, setup.run(step))
            elif step is SetupStep.SERVE:
                _line(step, f"onebox serve {arguments.shell_text(setup.checkpoint)}")
            else:
                outlook = setup.outlook(step)
                _line(step, f"{'done' if outlook.is_done else 'to do'}: {outlook.text}")
        except OneboxError as error:
            _line(step, f"would be refused: {error}")
            refused = True
            if step is SetupStep.FETCH:  # of sources that cannot be read, nothing more is known
                break
    if refused:
        raise typer.Exit(1)


def _do(setup: "Setup", arguments: "ServeArguments", last: "SetupStep", name_step: Callable[[str], None]) -> None:
    from onebox.setup.steps import SetupStep

    for step in _steps(last):
        name_step(step)
        if step is SetupStep.SERVE:
            _line(step, f"onebox serve {arguments.shell_text(setup.checkpoint)}")
            arguments.serve(setup.checkpoint)
        outlook = setup.outlook(step)
        if outlook.is_done:
            _line(step, f"done: {outlook.text}")
            continue
        if step is not SetupStep.CHECK:
            _line(step, outlook.text)
        began = time.perf_counter()
        result = setup.run(step)
        _line(step, f"{result}\ndone in {time.perf_counter() - began:.1f} s")


def _line(step: str, text: str) -> None:
    first, *others = text.splitlines()
    typer.echo("\n".join([f"{step:<8}{first}", *(f"{'':<8}{line}" for line in others)]))
