"""`onebox service`: runs `onebox serve` under systemd, for one user or for the machine.

The unit restarts on failure, is ready when the model is (Type=notify), and may use as much host memory as the plan of
its model says, with room for the server's own processes.
"""

import getpass
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.serve_options import HttpOptions
from onebox.spec.errors import OneboxError, UnreadableError, UnsupportedError, UsageError, WriteError

if TYPE_CHECKING:
    from onebox.cli.serve_arguments import ServeArguments
    from onebox.planner.memory import MemoryPlan

__all__ = ["service_app", "unit_text"]

service_app = typer.Typer(
    help="Run `onebox serve` as a service of systemd: started at boot, restarted on failure.", no_args_is_help=True
)
_HOST_BYTES = 6 * 2**30
"""For the server's processes, tokenizer, buffers and page cache beside what the plan says."""
_ENDING_S = 30
"""For the end after running answers had their time: prefixes are written, the engine ends."""
_GIB = 2**30
System = Annotated[
    bool, typer.Option("--system", help="A service of the machine (needs root), not of this user alone.")
]
Name = Annotated[str, typer.Option(help="The service's name.")]
_NAME = "onebox"


@service_app.command()
def install(
    serve_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SERVE_OPTIONS", help="The model and options of `onebox serve`, after `--`."),
    ] = None,
    name: Name = _NAME,
    system: System = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit and change nothing.")] = False,
) -> None:
    """Write a unit for `onebox serve` with these options, enable and start it. Checked first, as serve would."""
    words = list(serve_arguments or [])
    arguments = _checked(words)
    drain_s = arguments.group(HttpOptions).shutdown_timeout
    text = unit_text(_absolute(words), _plan(arguments), is_system=system, drain_s=drain_s)
    if dry_run:
        typer.echo(text, nl=False)
        return
    _require_systemd()
    path = _unit_path(name, is_system=system)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        hint = "; run it with sudo, or leave --system out" if isinstance(error, PermissionError) else ""
        raise WriteError(f"{path} cannot be written: {error.strerror}{hint}.") from None
    _systemctl(["daemon-reload"], is_system=system)
    _systemctl(["enable", "--now", "--no-block", f"{name}.service"], is_system=system)
    typer.echo(f"{path} is written and started: `onebox service status`, `onebox service logs`.")
    if not system:
        typer.echo(f"It ends with your last session unless you run: sudo loginctl enable-linger {getpass.getuser()}")


@service_app.command()
def status(name: Name = _NAME, system: System = False) -> None:
    """Show whether it runs, since when, and its memory."""
    _require_installed(name, is_system=system)
    raise typer.Exit(_systemctl(["status", "--no-pager", f"{name}.service"], is_system=system, may_fail=True))


@service_app.command()
def logs(
    name: Name = _NAME,
    system: System = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 100,
) -> None:
    """Show what it said, from the journal."""
    _require_installed(name, is_system=system)
    program = shutil.which("journalctl")
    if program is None:
        raise UnsupportedError("journalctl is not installed: the journal of systemd cannot be read.")
    words = [program, *([] if system else ["--user"]), "-u", f"{name}.service", "-n", str(lines)]
    raise typer.Exit(subprocess.run([*words, *(["-f"] if follow else ["--no-pager"])], check=False).returncode)


@service_app.command()
def uninstall(name: Name = _NAME, system: System = False) -> None:
    """Stop it and remove its unit; models, caches and settings stay."""
    path = _require_installed(name, is_system=system)
    _systemctl(["disable", "--now", f"{name}.service"], is_system=system, may_fail=True)
    try:
        path.unlink()
    except OSError as error:
        raise WriteError(f"{path} cannot be removed: {error.strerror}.") from None
    _systemctl(["daemon-reload"], is_system=system)
    typer.echo(f"{path} is removed. Models and caches are where they were.")


def unit_text(
    words: list[str],
    plan: "MemoryPlan | None",
    *,
    is_system: bool,
    drain_s: float = 30.0,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """The unit for `onebox serve` with these arguments; `drain_s`: what running answers have when it is stopped."""
    command = [sys.executable, "-m", "onebox", "serve", *words]
    settings = [f"{key}={value}" for key, value in sorted(environment.items()) if _is_setting(key)]
    lines = [
        "[Unit]",
        "Description=onebox: serves a model on an OpenAI-compatible API",
        *(["Wants=network-online.target", "After=network-online.target"] if is_system else []),
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=notify",
        "ExecStart=" + " ".join(map(_quoted, command)),
        f"WorkingDirectory={_escaped(str(Path.cwd()))}",
        *(f"Environment={_quoted(setting)}" for setting in settings),
        *([f"User={_service_user(environment)}"] if is_system else []),
        "RuntimeDirectory=onebox",
        "RuntimeDirectoryPreserve=yes",  # a second service has its file there too
        "Restart=on-failure",
        "RestartSec=5",
        "TimeoutStartSec=15min",
        f"TimeoutStopSec={math.ceil(drain_s) + _ENDING_S}",
        "KillMode=mixed",
        "OOMPolicy=continue",
        *_memory_lines(plan),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if is_system else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def _memory_lines(plan: "MemoryPlan | None") -> list[str]:
    """Limits on host memory. A GPU's own memory counts for none of it, unified memory does."""
    if plan is None:
        return ["MemorySwapMax=0"]
    used = sum(part.bytes for part in plan.parts if part.name not in ("reserve", "unused"))
    host = _HOST_BYTES + (used if plan.box.unified else 0)
    return [f"MemoryHigh={-(-host // _GIB)}G", f"MemoryMax={-(-(host + 2 * _GIB) // _GIB)}G", "MemorySwapMax=0"]


def _is_setting(key: str) -> bool:
    """Keys are secrets: they belong into a file of --api-key-file, not into a unit that everybody reads."""
    kept = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    return key in kept or (key.startswith("ONEBOX_") and "KEY" not in key and key != "ONEBOX_RESTARTED")


def _service_user(environment: Mapping[str, str]) -> str:
    return environment.get("SUDO_USER") or getpass.getuser()


def _escaped(text: str) -> str:
    """For a unit: % begins a specifier."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    text = _escaped(word).replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"' if not text or set(text) & set(" \t'\"\\{};") else text


def _absolute(words: list[str]) -> list[str]:
    """The arguments with a directory that is given by a relative path made absolute."""
    return [str(Path(word).absolute()) if not word.startswith("-") and Path(word).exists() else word for word in words]


def _checked(words: list[str]) -> "ServeArguments":
    """What the words mean; refuses wrong ones now, not in the journal."""
    from onebox.cli.serve_arguments import ServeArguments

    arguments = ServeArguments.of_words(words)
    if "--api-key" in words or any(word.startswith("--api-key=") for word in words):
        raise UsageError("A unit can be read by everybody: put keys into a file and give --api-key-file FILE.")
    return arguments


def _plan(arguments: "ServeArguments") -> "MemoryPlan | None":
    """The memory plan of what will be served. None: the pocket model."""
    from onebox.checkpoint.hub import resolve_source
    from onebox.engine.api import TokenInfo, plan_engine

    model = arguments.values["model"]
    try:
        options = arguments.engine_options()
        return None if model is None else plan_engine(resolve_source(model), options, TokenInfo()).memory
    except OneboxError as error:
        raise type(error)(f"onebox serve would be refused: {error}") from None


# systemd.


def _unit_path(name: str, *, is_system: bool) -> Path:
    if is_system:
        return Path("/etc/systemd/system") / f"{name}.service"
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home, "systemd", "user", f"{name}.service")


def _require_installed(name: str, *, is_system: bool) -> Path:
    path = _unit_path(name, is_system=is_system)
    if not path.is_file():
        other = " (there is one with --system)" if not is_system and _unit_path(name, is_system=True).is_file() else ""
        raise UnreadableError(f"{path} is not there{other}; `onebox service install -- DIR` makes it.")
    _require_systemd()
    return path


def _require_systemd() -> None:
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        raise UnsupportedError(
            "This machine is not run by systemd, so it has no services to install; --dry-run prints the unit."
        )


def _systemctl(words: list[str], *, is_system: bool, may_fail: bool = False) -> int:
    command = [shutil.which("systemctl") or "systemctl", *([] if is_system else ["--user"]), *words]
    done = subprocess.run(command, check=False)
    if done.returncode and not may_fail:
        raise UnsupportedError(f"`{' '.join(['systemctl', *command[1:]])}` failed with status {done.returncode}.")
    return done.returncode
