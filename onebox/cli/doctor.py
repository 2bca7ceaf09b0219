"""`onebox doctor`: whether this machine can run onebox well; each line is good, or says what to do."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from onebox.cli.doctor_machine import DoctorLine, DoctorMark, machine_checks

__all__ = ["doctor"]

_MARKS = {DoctorMark.GOOD: "good", DoctorMark.NOTE: "note", DoctorMark.BAD: "BAD "}
_TEXT_COLUMN = 18


def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that the server will listen on.")] = 8000,
    directory: Annotated[Path, typer.Option("--dir", help="Where checkpoints will lie.")] = Path("models"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the kernels' self-test and the answer, which take a minute.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write everything into this file as well, to attach to an issue.")
    ] = None,
) -> None:
    """Check this machine: GPU, driver, torch, Triton, compiler, memory, disk, port, clocks, kernels, an answer.

    Exit code 1 if something must be changed before onebox can run here.
    """
    from onebox.cli.doctor_report import write_report
    from onebox.cli.doctor_trial import trial_checks

    checks = [*machine_checks(port, directory), *([] if quick else trial_checks())]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    findings = []
    for found in _run(checks):
        findings.append(found)
        typer.echo(_line(found, width))
    if report is not None:
        write_report(report, [_line(found) for found in findings])
        typer.echo(f"Everything is in {report}: no prompts, no keys; have a look before you send it.")
    num_bad = sum(found.health is DoctorMark.BAD for found in findings)
    if num_bad:
        typer.echo(f"{num_bad} to change before onebox can run well here.")
        raise typer.Exit(1)
    typer.echo("onebox can run here.")


def _run(checks: list[Callable[[], DoctorLine]]) -> Iterator[DoctorLine]:
    """A check that fails in an unforeseen way is a finding too."""
    for check in checks:
        began = time.perf_counter()
        try:
            yield check()
        except Exception as error:
            name = getattr(check, "func", check).__name__.removeprefix("check_").replace("_", " ")
            taken = time.perf_counter() - began
            text = " ".join(str(error).split()) or type(error).__name__
            yield DoctorLine(name, DoctorMark.BAD, f"failed after {taken:.0f} s: {text}")


def _line(found: DoctorLine, width: int | None = None) -> str:
    """`width`: columns of the terminal that shows it; None where no terminal does."""
    lines = (found.text + (f"\n-> {found.advice}" if found.advice else "")).splitlines()
    if width is not None:
        room = max(width - _TEXT_COLUMN, 20)
        lines = [part for line in lines for part in textwrap.wrap(line, room, break_on_hyphens=False)]
    first, *others = lines
    head = f"{_MARKS[found.health]}  {found.name}"
    return "\n".join([f"{head:<{_TEXT_COLUMN}}{first}", *(f"{'':<{_TEXT_COLUMN}}{line}" for line in others)])
