"""`onebox cache`: what the directory of prefixes holds, and changes to it; servers may run meanwhile."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.progress import byte_progress
from onebox.spec.errors import UnreadableError, UsageError

if TYPE_CHECKING:
    from onebox.store.survey import FamilySummary, PrefixSurvey

__all__ = ["cache_app"]

cache_app = typer.Typer(
    help="Look after the prefixes that `onebox serve --prefix-dir` keeps on disk. Servers may run meanwhile.",
    no_args_is_help=True,
)

_Dir = Annotated[
    Path | None, typer.Option("--dir", help="The directory of --prefix-dir; default: that of --prefix-dir auto.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Keys = Annotated[
    list[str], typer.Argument(help="Keys as `ls` shows them, or FAMILY/KEY; the first digits are enough.")
]


@cache_app.command("ls")
def list_entries(
    directory: _Dir = None,
    family: Annotated[str | None, typer.Option(help="Only this family, by the first digits of its name.")] = None,
    as_json: _Json = False,
) -> None:
    """List the families and their entries, the last used first."""
    survey = _survey(directory)
    if family is not None:
        survey.families = [survey.family(family)]
    summaries = survey.summaries()
    if as_json:
        _print_json({"directory": str(_directory(directory)), "families": [asdict(each) for each in summaries]})
        return
    for summary in summaries:
        _print_family(summary)
    if not summaries:
        typer.echo(f"{_directory(directory)} holds no prefixes.")


@cache_app.command("stat")
def show_totals(directory: _Dir = None, as_json: _Json = False) -> None:
    """Show the totals of each family and of all."""
    summaries = _survey(directory).summaries()
    rows = [_totals([summary]) for summary in summaries]
    if as_json:
        families = [{"fingerprint": each.fingerprint, **row} for each, row in zip(summaries, rows, strict=True)]
        _print_json({"directory": str(_directory(directory)), "families": families, "total": _totals(summaries)})
        return
    typer.echo(f"{_directory(directory)}")
    for summary, row in zip(summaries, rows, strict=True):
        typer.echo(f"  {summary.fingerprint[:12]}  {_totals_line(row)}  {_about(summary)}")
    typer.echo(f"  total         {_totals_line(_totals(summaries))}")


@cache_app.command("verify")
def verify_files(
    directory: _Dir = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged, and what nobody needs.")] = False,
    as_json: _Json = False,
) -> None:
    """Read every file and compare it with its checksum.

    Exit code: 0 all match, 1 something is damaged, 2 the directory is unreadable.
    """
    survey = _survey(directory)
    with byte_progress("verifying", survey.num_check_bytes) as on_bytes:
        problems = list(survey.problems(on_bytes))
    num_removed = 0
    if remove:
        num_removed = survey.remove_problems(problems)
        survey.remove_leftovers()
    num_entries = sum(len(family.entries) for family in survey.families) + num_removed
    if as_json:
        found = [{**asdict(problem), "path": str(problem.path)} for problem in problems]
        _print_json({"num_entries": num_entries, "problems": found, "num_removed": num_removed})
    else:
        for problem in problems:
            typer.echo(f"problem: {problem.message}")
        removed = f" {_count(num_removed, 'damaged entry', 'damaged entries')} removed." if remove and problems else ""
        files = _count(len(problems), "file", "files")
        state = f"{files} cannot be used." if problems else "all files match their checksums."
        typer.echo(f"{_count(num_entries, 'entry', 'entries')}, {_size(survey.num_check_bytes)}: {state}{removed}")
    if problems:
        raise typer.Exit(1)


@cache_app.command("rm")
def remove_entries(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys as `ls` shows them; the first digits are enough.")
    ] = None,
    directory: _Dir = None,
    family: Annotated[str | None, typer.Option(help="All of this family, by the first digits of its name.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All families.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove entries, a family, or all."""
    if bool(keys) + (family is not None) + everything != 1:
        raise UsageError("Give keys, --family or --all: one of the three.")
    survey = _survey(directory)
    if keys:
        num_entries, num_bytes = survey.remove_entries([survey.find(key) for key in keys])
    else:
        families = survey.families if family is None else [survey.family(family)]
        num_entries, num_bytes = survey.remove_families(families)
    if as_json:
        _print_json({"num_removed": num_entries, "freed_bytes": num_bytes})
    else:
        typer.echo(f"{_count(num_entries, 'entry', 'entries')} removed, {_size(num_bytes)} freed.")


@cache_app.command("pin")
def pin_entries(keys: _Keys, directory: _Dir = None) -> None:
    """Have entries evicted only when no others are left."""
    survey = _survey(directory)
    for family, key in [survey.find(key) for key in keys]:
        if not family.pin(key):
            raise UnreadableError(f"{family.pin_path(key)} cannot be written.")
        typer.echo(f"{key.hex()} is pinned.")


@cache_app.command("unpin")
def unpin_entries(keys: _Keys, directory: _Dir = None) -> None:
    """Take pins away."""
    survey = _survey(directory)
    for family, key in [survey.find(key) for key in keys]:
        typer.echo(f"{key.hex()} is no longer pinned." if family.unpin(key) else f"{key.hex()} was not pinned.")


def _directory(given: Path | None) -> Path:
    from onebox.spec.prefix_place import default_prefix_directory

    return given or default_prefix_directory()


def _survey(given: Path | None) -> "PrefixSurvey":
    from onebox.store.survey import PrefixSurvey

    directory = _directory(given)
    try:
        next(directory.iterdir(), None)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and given is None:
            raise UnreadableError(f"No prefixes are kept in {directory}: give --dir, as --prefix-dir was.") from None
        raise UnreadableError(f"--dir {directory} cannot be listed ({error.strerror}).") from None
    return PrefixSurvey(directory)


def _print_family(summary: "FamilySummary") -> None:
    from rich.console import Console
    from rich.table import Table

    for line in _family_lines(summary):
        typer.echo(line)
    if not summary.entries:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("  key", no_wrap=True)
    for name in ("tokens", "bytes", "its own", "created", "last used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for entry in summary.entries:
        sizes = (f"{entry.num_tokens:,}", _size(entry.num_bytes), _size(entry.own_bytes))
        times = (_ago(entry.created), _ago(entry.last_used))
        table.add_row(f"  {entry.key[:16]}", *sizes, *times, "pinned" if entry.is_pinned else "")
    console = Console(width=max(100, Console().width), highlight=False)
    console.print(table)


def _family_lines(summary: "FamilySummary") -> Iterator[str]:
    use = "in use" if summary.is_in_use else "not in use"
    num_entries = _count(len(summary.entries), "entry", "entries")
    yield f"{summary.fingerprint}  {num_entries}, {_size(summary.num_bytes)}, {use}"
    for name, value in sorted({**summary.parts, **summary.label}.items()):
        yield f"  {name}: {value}"
    if not summary.parts:
        yield "  what it is for is not known: its about.json is missing or damaged"
    if summary.num_unreadable:
        yield f"  {_count(summary.num_unreadable, 'entry', 'entries')} cannot be read: see `onebox cache verify`"


def _totals(summaries: "Sequence[FamilySummary]") -> dict[str, int]:
    entries = [entry for summary in summaries for entry in summary.entries]
    return {
        "num_entries": len(entries),
        "num_pinned": sum(entry.is_pinned for entry in entries),
        "num_tokens": sum(entry.num_tokens for entry in entries),
        "num_bytes": sum(summary.num_bytes for summary in summaries),
        "num_unreadable": sum(summary.num_unreadable for summary in summaries),
    }


def _totals_line(row: dict[str, int]) -> str:
    return (
        f"{row['num_entries']:>8,} entries  {row['num_tokens']:>14,} tokens  {_size(row['num_bytes']):>10}  "
        f"{row['num_pinned']:>6,} pinned"
    )


def _about(summary: "FamilySummary") -> str:
    name = summary.label.get("model") or summary.parts.get("model") or "unknown model"
    return f"{name}, in use" if summary.is_in_use else name


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _print_json(value: dict[str, Any]) -> None:
    echo_json(value, indent=1)
