"""How every command reads its settings and prints its help.

Help is plain text that fits the terminal: each option's whole name, in ASCII boxes or none, by topic. An option that is
not on the command line is taken from the environment, then from the file of `--config` (`settings.py`).
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from onebox.cli.counts import COUNT_HELP, COUNT_OPTIONS, read_counts
from onebox.cli.json_output import JSON_NAME, json_alone
from onebox.cli.settings import CONFIG_NAME, SETTINGS_HELP, is_option, read_settings
from onebox.spec.errors import UsageError

__all__ = ["OneboxCommand", "OneboxGroup", "argument_name", "dress", "usage_words"]

_NARROWEST, _WIDEST = 40, 100
_WORDS_OF_OTHERS = {
    "run": "`onebox serve DIR` serves a model, `onebox chat` talks to it; `onebox up NAME` fetches and builds it first",
    "show": "`onebox inspect DIR` shows what a checkpoint holds",
    "help": "`onebox --help` lists the commands, `onebox COMMAND --help` the options of one",
}
"""Commands that people know from Ollama and others, and what to type here."""
_BAD_PARAMETER: Any = typer.BadParameter


class OneboxCommand(TyperCommand):
    """A command whose options may be set by the environment and by a file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write_help(self, ctx, formatter)
        if self._takes_config:
            _write_text(formatter, SETTINGS_HELP)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or set(args) & set(ctx.help_option_names):
            return super().parse_args(ctx, args)
        settings = read_settings(self.get_params(ctx), args)
        ctx.default_map = settings.values
        try:
            return super().parse_args(ctx, read_counts(args))
        except _BAD_PARAMETER as error:
            name = getattr(error.param, "name", None)
            if COUNT_OPTIONS & set(getattr(error.param, "opts", ())):
                error.message = COUNT_HELP
            if name in settings.sources and ctx.get_parameter_source(name).name == "DEFAULT_MAP":
                error.message = f"{settings.sources[name]}: {error.message}"
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return list(usage_words(self.get_params(ctx)))

    def invoke(self, ctx: Any) -> Any:
        with json_alone() if ctx.params.get(JSON_NAME) else nullcontext():
            return super().invoke(ctx)

    @property
    def _takes_config(self) -> bool:
        return any(parameter.name == CONFIG_NAME for parameter in self.params)


class OneboxGroup(TyperGroup):
    """A command with commands of its own."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write_help(self, ctx, formatter)
        names = [name for name, command in self.commands.items() if not command.hidden]
        formatter.write("\nCommands:\n")
        _write_rows(formatter, [(name, _first_paragraph(self.commands[name].help)) for name in names])
        if ctx.parent is None:
            _write_text(formatter, SETTINGS_HELP)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if ctx.parent is None and args[0] in _WORDS_OF_OTHERS:
            raise UsageError(f"`onebox {args[0]}` is no command: {_WORDS_OF_OTHERS[args[0]]}.")
        return super().resolve_command(ctx, args)


def dress(app: typer.Typer) -> None:
    """Gives all commands below `app` these classes, where they have none of their own."""
    app.info.cls = OneboxGroup
    for command in app.registered_commands:
        if command.cls in (None, TyperCommand):
            command.cls = OneboxCommand
    for group in app.registered_groups:
        group.cls = OneboxGroup
        if group.typer_instance is not None:
            dress(group.typer_instance)


def usage_words(parameters: Sequence[Any]) -> Iterator[str]:
    """What stands behind a command's name: [OPTIONS] MODEL."""
    if any(is_option(each) and not each.hidden for each in parameters):
        yield "[OPTIONS]"
    for argument in parameters:
        if argument.param_type_name == "argument" and not argument.hidden:
            yield argument_name(argument) if argument.required else f"[{argument_name(argument)}]"


def argument_name(argument: Any) -> str:
    """As help shows it."""
    return str(argument.metavar or argument.name.upper())


def _write_help(command: Any, ctx: Any, formatter: Any) -> None:
    formatter.width = max(_NARROWEST, min(formatter.width, _WIDEST))
    command.format_usage(ctx, formatter)
    _write_text(formatter, command.help or "")
    parameters = command.get_params(ctx)
    arguments = [each for each in parameters if each.param_type_name == "argument" and not each.hidden]
    if arguments:
        formatter.write("\nArguments:\n")
        _write_rows(formatter, [(argument_name(each), each.help or "") for each in arguments])
    options = [each for each in parameters if is_option(each) and not each.hidden]
    for panel in dict.fromkeys(_panel(each) for each in options):
        formatter.write(f"\n{panel}:\n")
        _write_rows(formatter, [_option_row(each) for each in options if _panel(each) == panel])


def _panel(option: Any) -> str:
    return option.rich_help_panel or "Options"


def _option_row(option: Any) -> tuple[str, str]:
    """The names with a word for the value, and the help with the default."""
    # The last word of the longest name stands for the value: --max-model-len LEN.
    long = max(option.opts, key=len)
    value = "" if option.is_flag else f" {option.metavar or long.rpartition('-')[2].upper()}"
    names = ", ".join(sorted(option.opts, key=len)) + value
    if option.secondary_opts:
        names += f" / {option.secondary_opts[0]}"
    return names, " ".join(filter(None, (option.help or "", _default(option))))


def _default(option: Any) -> str:
    if option.required:
        return "[required]"
    if option.is_flag:
        return f"[default: {'on' if option.default else 'off'}]" if option.secondary_opts else ""
    default = option.default() if callable(option.default) else option.default
    if default is None or default in ("", (), [], "[]", "{}"):
        return ""
    return f"[default: {getattr(default, 'value', default)}]"


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def _write_text(formatter: Any, text: str) -> None:
    for paragraph in filter(None, textwrap.dedent(text).strip().split("\n\n")):
        formatter.write("\n")
        for line in _wrapped(" ".join(paragraph.split()), formatter.width - 2):
            formatter.write(f"  {line}\n")


def _write_rows(formatter: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Names in a column, what they mean beside them; under a name that is wider than the column."""
    column = min(max(len(name) for name, _ in rows), formatter.width // 3)
    for name, text in rows:
        lines = list(_wrapped(text, formatter.width - column - 4))
        if len(name) > column or not lines:
            formatter.write(f"  {name}\n")
        else:
            formatter.write(f"  {name:<{column}}  {lines.pop(0)}\n")
        for line in lines:
            formatter.write(f"  {'':<{column}}  {line}\n")


def _wrapped(text: str, width: int) -> Iterator[str]:
    # Whole flags: a name broken at its hyphens cannot be copied. A list without blanks is continued after a comma.
    width = max(width, 20)
    for line in textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False):
        while len(line) > width and "," in line[:width]:
            end = line.rindex(",", 0, width) + 1
            yield line[:end]
            line = line[end:]
        yield line
