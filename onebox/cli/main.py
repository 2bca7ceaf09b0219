"""The `onebox` command: one verb per file, errors as sentences, exit codes that scripts can use."""

import contextlib
import errno
import os
import platform
import signal
import sys
from typing import Any, NoReturn

if __name__ == "__main__":
    from onebox.cli.entry import prepare

    prepare()

import typer
from typer.main import get_command

import onebox
from onebox.cli.bench import bench_app
from onebox.cli.build import build
from onebox.cli.cache import cache_app
from onebox.cli.chat import chat
from onebox.cli.command import dress
from onebox.cli.doctor import doctor
from onebox.cli.draft_vocab import draft_vocab
from onebox.cli.eval import eval_command
from onebox.cli.fleet import fleet_app
from onebox.cli.inspect import inspect
from onebox.cli.launch_line import LaunchCommand
from onebox.cli.plain_output import spell_what_cannot_be_written
from onebox.cli.plan import plan
from onebox.cli.printable import printable
from onebox.cli.pull import pull
from onebox.cli.quantize import quantize
from onebox.cli.report import report
from onebox.cli.scaleout import scaleout_app
from onebox.cli.serve import serve
from onebox.cli.service import service_app
from onebox.cli.settings import is_option, unknown_variables, variable_name
from onebox.cli.stock import list_checkpoints, processes, remove, stop
from onebox.cli.tune import tune
from onebox.cli.up import up
from onebox.cli.verify import verify
from onebox.cli.warm import warm
from onebox.spec.errors import OneboxError, WriteError

__all__ = ["app", "main"]

# Base class of typer's argument errors; it has no public name.
_WRONG_ARGUMENTS: Any = typer.BadParameter.__base__
INTERRUPTED = 130  # the conventional exit status after Ctrl-C
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = typer.Typer(
    help="Run a 100B-class hybrid mixture-of-experts model on one box.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for verb in (doctor, up, pull, inspect, build, quantize, verify, plan, serve, chat, tune, warm, draft_vocab):
    # A launch line is given to both: `warm` compiles what `serve` will need.
    app.command(cls=LaunchCommand if verb in (serve, warm) else None)(verb)
app.command("list")(list_checkpoints)
app.command("ps")(processes)
app.command()(stop)
app.command("rm")(remove)
app.add_typer(service_app, name="service")
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")
app.add_typer(fleet_app, name="fleet")
app.command("eval")(eval_command)
app.command()(report)
app.add_typer(scaleout_app, name="scaleout")


@app.command()
def version() -> None:
    """Print the versions of onebox, Python, torch and Triton."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    typer.echo(f"onebox {onebox.__version__}")
    typer.echo(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "triton", "transformers"):
        try:
            typer.echo(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} is not installed")


dress(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onebox {onebox.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Runs the command line; every error is one sentence on stderr."""
    _open_standard_streams()
    spell_what_cannot_be_written()
    for line in unknown_variables(_variables(get_command(app))):
        typer.echo(line, err=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    previous, sys.unraisablehook = sys.unraisablehook, _unraisable
    try:
        _run()
    finally:
        sys.unraisablehook = previous


def _variables(command: Any) -> set[str]:
    """The environment variables of all options of a command and those below it."""
    names = {variable_name(parameter) for parameter in command.params if is_option(parameter)}
    return names.union(*(_variables(child) for child in getattr(command, "commands", {}).values()))


def _run() -> None:
    try:
        status = app(standalone_mode=False, prog_name="onebox") or 0
        if status == INTERRUPTED:  # typer makes this of Ctrl-C
            _exit_interrupted()
        sys.exit(status)
    except (KeyboardInterrupt, typer.Abort):
        _exit_interrupted()
    except _WRONG_ARGUMENTS as error:
        error.show()
        sys.exit(error.exit_code)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer makes status 1 of it
            _exit_unread()
        raise
    except BrokenPipeError:
        _exit_unread()
    except OneboxError as error:
        # It may name what a file or a server holds.
        typer.echo(f"onebox: {printable(error)}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if _was_interrupted(error):
            _exit_interrupted()
        if isinstance(error, OSError) and error.errno in _FULL:
            _exit_full(error)
        raise


def _exit_interrupted() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    typer.echo("onebox: stopped.", err=True)
    # From now on Ctrl-C ends the process at once and silently, whatever it waits for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(INTERRUPTED)


def _exit_unread() -> NoReturn:
    """The reader closed the pipe (`onebox inspect | head`): it has what it wanted, so this is no failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
    sys.exit(0)


def _exit_full(error: OSError) -> NoReturn:
    where = f"{error.filename}" if error.filename else "the output"
    typer.echo(f"onebox: {where} could not be written: {error.strerror}.", err=True)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(WriteError.exit_code)


def _was_interrupted(error: BaseException | None) -> bool:
    """Ctrl-C during an import or inside a library's callback can come out as another error that follows from it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """A Ctrl-C that cannot be raised where it came, as in a finalizer, is not worth a traceback."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _open_standard_streams() -> None:
    """Opens standard streams that are closed: a socket that took the number of one would receive what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


if __name__ == "__main__":
    main()
