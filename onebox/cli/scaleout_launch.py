"""`onebox scaleout launch`: vLLM on all hosts by one command, printed or run over ssh."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.options import grouped, option_group
from onebox.spec.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from onebox.scaleout.commands import NodeCommand
    from onebox.scaleout.environment import NodeVariable
    from onebox.scaleout.flags import ServeFlags
    from onebox.scaleout.hosts import Fabric

__all__ = ["launch"]

_NEWS_S = 30.0


@option_group("Program")
class ProgramOptions:
    """What is run on the hosts."""

    program: Annotated[
        str, typer.Option(help="vLLM's program on every host, such as /opt/vllm/bin/vllm; words as in a shell.")
    ] = "vllm"
    ssh: Annotated[
        str | None, typer.Option(help="The ssh command; default: ssh without passwords, noticing dead hosts.")
    ] = None
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable for every node; may be given often.")
    ] = None
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port on the head by which the nodes find each other.")
    ] = 25000
    sysfs: Annotated[str, typer.Option(hidden=True, help="Where sysfs is on the hosts.")] = "/sys"

    def settings(self) -> "tuple[NodeVariable, ...]":
        from onebox.scaleout.environment import NodeVariable

        pairs = [entry.partition("=") for entry in self.env or ()]
        wrong = next((name for name, equals, _ in pairs if not equals or not name), None)
        if wrong is not None:
            raise UsageError(f"--env {wrong} is not NAME=VALUE.")
        return tuple(NodeVariable(name, value, "given with --env") for name, _, value in pairs)

    def words(self, flag: str, text: str) -> tuple[str, ...]:
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise UsageError(f"{flag} {text!r} cannot be split into words ({error}).") from None
        if not words:
            raise UsageError(f"{flag} is empty.")
        return words


@grouped
def launch(
    program: ProgramOptions,
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint; the same path on every host.")],
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SERVE_OPTIONS", help="Options of `onebox serve`, and any of vLLM's, after `--`."),
    ] = None,
    hosts: Annotated[str, typer.Option(help="The hosts, the head first, such as spark-1,spark-2.")] = "localhost",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size, over all hosts.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size, over all hosts.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until vLLM must answer.")] = 1800.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the hosts for their networks, print the commands, start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print what the nodes print.")] = False,
) -> None:
    """Start vLLM on all hosts, wait until it answers, and stop all nodes together: on Ctrl-C, or when one ends.

    Each host is asked over ssh for its RoCE devices and addresses. Exit code: 1 a node ended or did not come up, 2
    wrong arguments or a host that cannot be reached, 130 stopped by Ctrl-C.
    """
    from onebox.scaleout.commands import LaunchPlan, node_commands
    from onebox.scaleout.environment import fabric_notes
    from onebox.scaleout.flags import map_flags
    from onebox.scaleout.hosts import choose_fabrics
    from onebox.scaleout.launch import SSH, probe_hosts

    names = [name.strip() for name in hosts.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--hosts {hosts!r} is no list of different hosts; give for instance spark-1,spark-2.")
    flags = map_flags(serve_options or [])
    words, settings = program.words("--program", program.program), program.settings()
    model = os.path.abspath(checkpoint)  # noqa: PTH100 - a link may lead elsewhere on another host
    for note in _refuse_unloadable(checkpoint, flags, tp, pp):
        typer.echo(f"note: {note}")
    ssh = SSH if program.ssh is None else program.words("--ssh", program.ssh)
    reports = probe_hosts(names, ssh, model, program.sysfs)
    fabrics = choose_fabrics(reports)
    for note in (*flags.notices, *(note for fabric in fabrics for note in fabric_notes(fabric))):
        typer.echo(f"note: {note}")
    plan = LaunchPlan(
        model=model,
        tp=tp,
        pp=pp,
        program=words,
        master_port=program.master_port,
        settings=settings,
    )
    listening = _listening_address(names[0], fabrics[0], flags)
    commands = node_commands(plan, fabrics, flags, listening)
    if dry_run:
        typer.echo("\n\n".join(command.shown() for command in commands))
        return
    _run(commands, ssh, f"http://{_called(listening, fabrics[0])}:{flags.port}", timeout, _printer(quiet=quiet))


def _refuse_unloadable(checkpoint: Path, flags: "ServeFlags", tp: int, pp: int) -> list[str]:
    """The check of `onebox scaleout check`, where the checkpoint lies here too; returns what to say about it."""
    from onebox.cli.scaleout_check import open_check
    from onebox.scaleout.check import CheckRequest

    if not checkpoint.is_dir():
        return [f"{checkpoint} is not on this machine, so it is not checked: run `onebox scaleout check` where it is."]
    drafter = None if flags.drafter == "none" else flags.drafter
    found = open_check(checkpoint, CheckRequest(tp, pp, drafter=drafter))
    wrong = [finding.text for finding in found.findings if finding.is_fatal]
    if wrong:
        raise UnsupportedError("\n".join([f"vLLM does not load {checkpoint}:", *wrong]))
    return [finding.text for finding in found.findings]


def _listening_address(head: str, fabric: "Fabric", flags: "ServeFlags") -> str:
    """As given; else this machine alone where it is the head, or the head's own address."""
    from onebox.scaleout.flags import refuse_open_server
    from onebox.scaleout.nodes import is_here

    host = flags.host or ("127.0.0.1" if is_here(head) else fabric.address)
    refuse_open_server(host, flags)
    return host


def _called(listening: str, fabric: "Fabric") -> str:
    return fabric.address if listening in ("0.0.0.0", "::") else listening  # noqa: S104 - compared, not listened on


def _printer(*, quiet: bool) -> "Callable[[NodeCommand, str], None]":
    def show(command: "NodeCommand", line: str) -> None:
        if not quiet:
            typer.echo(f"[{command.node_rank} {command.host}] {line}")

    return show


def _run(
    commands: "Sequence[NodeCommand]",
    ssh: "Sequence[str]",
    url: str,
    timeout_s: float,
    show: "Callable[[NodeCommand, str], None]",
) -> None:
    from onebox.scaleout.launch import NodeEndedError, launched_nodes

    told = 0.0

    def tell(waited_s: float) -> None:
        nonlocal told
        if waited_s - told >= _NEWS_S:
            told = waited_s
            typer.echo(f"{waited_s:.0f} s: {url}/health does not answer yet.")

    try:
        with launched_nodes(commands, ssh, show) as nodes:
            typer.echo(f"Started on {', '.join(command.host for command in commands)}.")
            seconds = nodes.wait_until_healthy(url, timeout_s, tell)
            typer.echo(f"Ready after {seconds:.0f} s at {url}/v1; Ctrl-C stops all nodes.")
            nodes.watch()
    except NodeEndedError as error:
        raise NodeEndedError(f"{error} All nodes are stopped.") from None
