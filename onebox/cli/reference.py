"""docs/cli.md: every command with its help, arguments, options and defaults, written from the commands themselves.

Regenerate it with `python -m onebox.cli.reference > docs/cli.md`; a test compares the two.
"""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from typer.main import get_command

from onebox.cli.command import argument_name, usage_words
from onebox.cli.main import app
from onebox.cli.settings import SETTINGS_HELP

__all__ = ["command_reference"]

_HEADER = """\
# Command line

Every command, its options and their defaults. This page is generated: change the commands in `onebox/cli/`, then run
`python -m onebox.cli.reference > docs/cli.md`.

{settings}

Shell completion: `onebox --install-completion` for bash, zsh, fish or PowerShell. `python -m onebox` is
the same program.
"""
_OPTIONS = "Options"


def command_reference() -> str:
    """The complete page as Markdown."""
    return _HEADER.format(settings="\n".join(textwrap.wrap(SETTINGS_HELP, 120))) + "".join(
        f"\n{block}\n" for block in _blocks("onebox", get_command(app))
    )


def _blocks(name: str, command: Any) -> Iterator[str]:
    """The blocks of a command, then those of its subcommands."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    shown = [option for option in options if not option.hidden]
    commands = getattr(command, "commands", {})
    yield f"## {name}"
    yield f"`{' '.join([name, *usage_words(command.params), *(['COMMAND'] if commands else [])])}`"
    if command.help:
        yield command.help
    if arguments:
        yield _table("argument", [(f"`{argument_name(each)}`", "", each.help or "") for each in arguments])
    panels = dict.fromkeys([_OPTIONS, *(option.rich_help_panel or _OPTIONS for option in shown)])
    for panel in panels:
        rows = [_option_row(option) for option in shown if (option.rich_help_panel or _OPTIONS) == panel]
        if rows:
            yield _table(panel.lower() if panel == _OPTIONS else panel, rows)
    for word, child in commands.items():
        yield from _blocks(f"{name} {word}", child)


def _option_row(option: Any) -> tuple[str, str, str]:
    names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names, _default(option), option.help or ""


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.is_flag:
        # A flag without a second name can only be switched on, so its default is not shown.
        return "" if not option.secondary_opts else f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    return "" if option.default in (None, "") else f"`{option.default}`"


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    lines = [f"| {title} | default | |", "|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(command_reference())
