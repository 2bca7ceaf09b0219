"""`onebox bench compare`: two result files side by side, with intervals. Failures first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.json_output import echo_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from onebox.bench.compare import RunComparison

__all__ = ["compare"]

WIDTH = 140
_PLURALS = {"run": "runs", "batch": "batches", "block": "blocks"}
FAILED, SLOWER, UNTOLD = 1, 3, 4


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A record written by `onebox bench --output`.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="A second record, compared with A.")],
    allow_different: Annotated[
        bool,
        typer.Option(
            "--allow-different", help="Compare the shared workloads although the requests of the runs differ."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """Compare two runs: ratios with intervals that hold jointly with 95% confidence.

    Overlapping requests are not independent: a load is compared by blocks of time, a sweep by batches, single requests
    by runs. Exit code: 0 nothing is slower, 1 a run has failures or is incomplete, 2 wrong arguments, 3 something is
    slower, 4 nothing is, but some rows are too few to tell.
    """
    from rich.console import Console

    from onebox.bench.compare import compare_runs
    from onebox.bench.record import read_run
    from onebox.bench.statistics import plain_json

    found = compare_runs(read_run(first), read_run(second), allow_different=allow_different)
    if as_json:
        echo_json(plain_json(found))
    else:
        console = Console() if Console().is_terminal else Console(width=WIDTH)
        for line in render(found, first, second):
            console.print(line)
    if any(found.num_failures) or any(found.interrupted):
        raise typer.Exit(FAILED)
    if found.slower:
        raise typer.Exit(SLOWER)
    raise typer.Exit(UNTOLD if found.untold else 0)


def render(found: "RunComparison", first: Path, second: Path) -> "list[RenderableType]":
    from rich.text import Text

    lines: list[RenderableType] = []
    for name, failures, interrupted in zip("AB", found.num_failures, found.interrupted, strict=True):
        if failures:
            lines.append(
                Text(f"{name} has {failures} FAILED requests; figures cover only the others.", style="bold red")
            )
        if interrupted:
            lines.append(Text(f"{name} was interrupted.", style="bold red"))
    lines += [Text(f"different: {line}", style="yellow") for line in found.differences]
    lines.append(Text.assemble(("A ", "bold"), str(first), ("  B ", "bold"), str(second)))
    lines += [Text(line, style="dim") for line in found.machines]
    lines += [_table(found), Text("Rows without a remark: no difference seen.", style="dim")]
    told = "; ".join(f"{row.workload}: {row.figure}" for row in found.slower)
    if found.untold:
        advice = "; ".join(found.advice)
        lines.append(
            Text(f"{len(found.untold)} of {len(found.rows)} rows are too few to tell: {advice}.", style="yellow")
        )
    if told:
        lines.append(Text(f"B is slower: {told}.", style="bold"))
    elif len(found.untold) < len(found.rows):
        rest = " of the other rows" if found.untold else ""
        lines.append(Text(f"Nothing{rest} is slower in B beyond chance.", style="bold"))
    return lines


def _table(found: "RunComparison") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("workload", "figure", "A", "B", "requests", "units", "B / A", "interval", ""):
        table.add_column(name, justify="left" if name in ("workload", "figure", "") else "right")
    previous = ""
    for row in found.rows:
        interval = f"{row.ratio.low:.3f} to {row.ratio.high:.3f}" if row.ratio.low == row.ratio.low else "-"
        table.add_row(
            row.workload if row.workload != previous else "",
            row.figure,
            f"{row.first:,.4g} {row.unit}",
            f"{row.second:,.4g} {row.unit}",
            f"{row.num_first}, {row.num_second}",
            f"{row.num_units[0]}, {row.num_units[1]} {_PLURALS[row.units]}",
            f"{row.ratio.estimate:.3f}",
            interval,
            "" if row.change.value == "no difference seen" else row.change.value,
            style={"slower": "red", "faster": "green", "too few to tell": "yellow"}.get(row.change.value, ""),
        )
        previous = row.workload
    return table
