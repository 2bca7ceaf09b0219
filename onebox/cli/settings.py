"""Settings beside the command line: `ONEBOX_*` variables for every option, and a TOML file for `serve`, `warm`, `plan`.

The command line counts first, then the environment, then the file. A variable is ONEBOX_ and the option's name:
ONEBOX_MAX_MODEL_LEN=32K. A key of the file is the option's name with dashes or underscores; an option that takes JSON
may be a table. What is no option is refused, or said.
"""

import difflib
import inspect
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from onebox.cli.counts import COUNT_OPTIONS, read_count
from onebox.cli.vllm_flags import FLAGS
from onebox.spec.errors import UnreadableError, UsageError

__all__ = [
    "CONFIG_NAME",
    "SETTINGS_HELP",
    "Settings",
    "configurable",
    "is_option",
    "read_settings",
    "unknown_variables",
    "variable_name",
]

CONFIG_NAME = "config"
_PREFIX = "ONEBOX_"
SETTINGS_HELP = (
    "Every option may also be set in the environment (--max-model-len as ONEBOX_MAX_MODEL_LEN) and, for serve, warm "
    "and plan, in a TOML file given with --config (max-model-len = 32768). The command line counts first, then the "
    "environment, then the file."
)
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_FOREIGN = ("ONEBOX_PORT_", "ONEBOX_SERVICE_", "ONEBOX_RESTARTED")
"""Of a Kubernetes service named onebox, and our own."""


@dataclass
class Settings:
    """Values of options that the environment and a file set, by the option's parameter name."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Where each is set, for errors."""

    def put(self, name: str, value: Any, source: str) -> None:
        self.values[name], self.sources[name] = value, source


def configurable(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--config FILE` to a command; `OneboxCommand` reads the file before the command runs."""
    annotation = Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file with options, named as the flags are.")
    ]
    option = inspect.Parameter(CONFIG_NAME, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)

    @wraps(command)
    def call(**given: Any) -> None:
        given.pop(CONFIG_NAME)
        command(**given)

    signature = inspect.signature(command)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    call.__annotations__ = {**command.__annotations__, CONFIG_NAME: annotation}
    return call


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def variable_name(option: Any) -> str:
    """The environment variable of an option: its own where it names one."""
    if isinstance(option.envvar, str):
        return str(option.envvar)
    return _PREFIX + _flag(option).lstrip("-").replace("-", "_").upper()


def read_settings(
    parameters: Sequence[Any], words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Settings:
    """What the environment and the file that `words` (or ONEBOX_CONFIG) name set of a command's parameters."""
    settings = Settings()
    path = _config_path(words, environment) if any(each.name == CONFIG_NAME for each in parameters) else None
    if path is not None:
        for key, value in _read_file(path).items():
            _put_key(settings, path, key, value, parameters)
    for option in filter(is_option, parameters):
        variable = variable_name(option)
        if variable in environment and option.name not in (CONFIG_NAME, "help"):
            _put_variable(settings, option, variable, environment[variable])
    return settings


def unknown_variables(known: set[str], environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A line for each variable that looks like a setting and is an option of no command."""
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and not name.startswith(_FOREIGN):
            yield f"{name} is set in the environment and is no option of onebox{_hint(name, known) or '.'}"


def _flag(option: Any) -> str:
    return str(max(option.opts, key=len))


def _hint(given: str, known: Sequence[str] | set[str]) -> str:
    near = difflib.get_close_matches(given, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


# The environment.


def _put_variable(settings: Settings, option: Any, variable: str, text: str) -> None:
    if variable == "ONEBOX_PORT" and "://" in text:
        return  # Kubernetes sets it for a service named onebox
    if option.is_flag:
        if text.strip().lower() not in _TRUE | _FALSE:
            raise UsageError(f"{variable} is {text}; it takes true or false.")
        settings.put(option.name, text.strip().lower() in _TRUE, variable)
    elif option.multiple:
        settings.put(option.name, text.split(), variable)
    else:
        settings.put(option.name, _counted(option, text), variable)


def _counted(option: Any, value: Any) -> Any:
    return read_count(value) if isinstance(value, str) and _flag(option) in COUNT_OPTIONS else value


# The file.


def _config_path(words: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """The last one on the command line, else that of ONEBOX_CONFIG."""
    found = environment.get(f"{_PREFIX}CONFIG") or None
    left = iter(words)
    for word in left:
        if word == "--":
            break
        if word == "--config":
            found = next(left, found)
        elif word.startswith("--config="):
            found = word.partition("=")[2]
    return None if found is None else Path(found)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableError(f"--config {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"--config {path} is not TOML: {error}.") from None


def _put_key(settings: Settings, path: Path, key: str, value: Any, parameters: Sequence[Any]) -> None:
    name = key.replace("_", "-")
    own = {_key(each): each for each in parameters if each.name not in (CONFIG_NAME, "help")}
    if name in own:
        settings.put(own[name].name, _file_value(path, key, value, own[name]), f"{path}: {key}")
    elif name not in _keys_of_serve():
        if name in FLAGS:
            hint = f": {FLAGS[name].reason}."
        else:
            hint = _hint(name, {*own, *_keys_of_serve()}) or "; --help lists them."
        raise UsageError(f"{path}: {key} is no option of onebox serve{hint}")


def _key(parameter: Any) -> str:
    return _flag(parameter).lstrip("-") if is_option(parameter) else str(parameter.name).replace("_", "-")


def _keys_of_serve() -> set[str]:
    """A file for serve may be given to warm and plan, which have fewer options."""
    from typer.main import get_command

    from onebox.cli.serve import serve

    app = typer.Typer(add_completion=False)
    app.command()(serve)
    return {_key(parameter) for parameter in get_command(app).params} - {CONFIG_NAME, "help"}


def _file_value(path: Path, key: str, value: Any, parameter: Any) -> Any:
    is_flag = is_option(parameter) and parameter.is_flag
    if isinstance(value, bool) != bool(is_flag):
        raise UsageError(
            f"{path}: {key} takes {'true or false' if is_flag else 'a text or a number, not true or false'}."
        )
    if is_option(parameter) and parameter.multiple:
        return [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, dict | list):  # of an option that takes JSON
        return json.dumps(value)
    return _counted(parameter, value) if is_option(parameter) else value
