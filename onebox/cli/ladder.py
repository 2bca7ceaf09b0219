"""`onebox bench ladder`: builds, serves and measures the step ladder, and shows what each step brought."""

import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.bench_options import RepeatOptions, RequestOptions, bench_settings, parse_names
from onebox.cli.build import SourceOptions
from onebox.cli.json_output import echo_json
from onebox.cli.options import grouped, option_group
from onebox.cli.progress import byte_progress
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from onebox.bench.ladder import LadderRow, Rung
    from onebox.bench.measure import BenchPlan
    from onebox.bench.record import Run
    from onebox.checkpoint.build import BuildPlan
    from onebox.planner.report import Weights

__all__ = ["ladder"]

FAILED, INTERRUPTED = 1, 130
_SEED = 1
_WIDTH = 160


@option_group("Ladder")
class LadderOptions:
    """Which rungs, and how they are served."""

    rungs: Annotated[
        str,
        typer.Option(
            help="Of base, hybrid, int8-head, mtp-1, mtp-2, mtp-3, turboquant; comma-separated. Default: all."
        ),
    ] = ""
    workloads: Annotated[str, typer.Option(help="Workloads of `onebox bench run`; comma-separated.")] = "short"
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate each answer to its token limit; otherwise the model ends it.")
    ] = False
    mtp: Annotated[str, typer.Option(help="The MTP layer's format in the built checkpoints, as for `build`.")] = "keep"
    serve_options: Annotated[
        str, typer.Option(help='Options of `onebox serve` for every rung, such as "--max-model-len 32768".')
    ] = ""
    start_patience: Annotated[float, typer.Option(min=1, help="Seconds that a server may take to start.")] = 1800.0
    discard_builds: Annotated[
        bool, typer.Option("--discard-builds", help="Delete a built checkpoint after its last rung.")
    ] = False


@option_group("Projection")
class ProjectionOptions:
    """The planner's figures beside the measured ones."""

    box: Annotated[str, typer.Option(help="dgx-spark, h200, or auto for this machine.")] = "auto"
    acceptance: Annotated[
        str, typer.Option(help="Acceptance of each draft over all steps, assumed before it is measured.")
    ] = "0.9,0.72,0.55"

    def accepted(self) -> tuple[float, ...]:
        from onebox.planner.roofline import parse_acceptance

        return parse_acceptance(self.acceptance)


@dataclass
class _Checkpoints:
    """The three checkpoints of a ladder: the base, and two that are built when a rung needs them."""

    base: Path
    directory: Path
    plans: "dict[str, BuildPlan]"

    def weights(self) -> "dict[str, Weights]":
        from onebox.cli.plan import planned_weights
        from onebox.planner.report import Weights

        found = {"base": planned_weights(str(self.base), None)}
        for name, plan in self.plans.items():
            spec = plan.sources.base.checkpoint.spec
            found[name] = Weights(self.base.name, f"{name}, as built by the ladder", spec, plan.class_bytes)
        return found

    def identity(self, name: str) -> str:
        import hashlib

        if name == "base":
            return hashlib.sha256((self.base / "config.json").read_bytes()).hexdigest()
        return self.plans[name].fingerprint

    def has_mtp(self, name: str) -> bool:
        return any(unit.module_class.in_mtp for unit in self.plans[name].units)

    def ready(self, name: str) -> Path:
        """Builds it if necessary."""
        from onebox.checkpoint.build import run_build

        if name == "base":
            return self.base
        plan, out = self.plans[name], self.directory / name
        typer.echo(f"building {out}: {plan.nbytes / 1e9:.2f} GB")
        with byte_progress(f"building {name}", plan.nbytes) as on_bytes:
            run_build(plan, out, on_bytes=on_bytes)
        return out

    def discard(self, name: str) -> None:
        if name != "base":
            shutil.rmtree(self.directory / name, ignore_errors=True)


@grouped
def ladder(
    sources: SourceOptions,
    options: LadderOptions,
    projection: ProjectionOptions,
    repeats: RepeatOptions,
    requests: RequestOptions,
    directory: Annotated[Path, typer.Option("--dir", help="Where checkpoints and records go.")] = Path("ladder"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as one line of JSON and nothing else; tables go to stderr.")
    ] = False,
) -> None:
    """Build, serve and measure each step in turn: base, FP8 shared experts, INT8 head, MTP-1 to 3, TurboQuant.

    Each rung's record is kept in DIR/rungs; run the same command again and only the missing rungs are measured. Exit
    code: 0, 1 if requests of a rung failed, 130 after Ctrl-C.
    """
    from onebox.bench.ladder import chosen_rungs, ladder_rows
    from onebox.bench.record import write_json
    from onebox.bench.statistics import plain_json
    from onebox.spec.hardware import named_box

    rungs, accepted, box = chosen_rungs(parse_names(options.rungs)), projection.accepted(), named_box(projection.box)
    checkpoints = _planned(sources, options, directory)
    weights = checkpoints.weights()
    (directory / "rungs").mkdir(parents=True, exist_ok=True)
    runs: dict[str, Run] = {}
    for rung in _possible(rungs, checkpoints):
        runs[rung.key] = _measured(rung, checkpoints, _bench_plan(rung, checkpoints, options, repeats, requests))
        if options.discard_builds and rung is [one for one in rungs if one.checkpoint == rung.checkpoint][-1]:
            checkpoints.discard(rung.checkpoint)
    rows = list(ladder_rows(runs, weights, box, accepted))
    told = plain_json({"box": box.name, "acceptance": accepted, "rows": [plain_json(row) for row in rows]})
    write_json(told, directory / "ladder.json")
    _show(rows, box.device, accepted)
    typer.echo(f"Rows: {directory / 'ladder.json'}; records: {directory / 'rungs'}.")
    if as_json:
        echo_json(told)


def _planned(sources: SourceOptions, options: LadderOptions, directory: Path) -> _Checkpoints:
    from onebox.checkpoint.build import plan_build
    from onebox.checkpoint.recipe import Recipe, TargetFormat

    if options.mtp not in [target.value for target in TargetFormat]:
        raise UsageError(f"--mtp is {options.mtp!r}; it must be one of {', '.join(TargetFormat)}.")
    mtp = TargetFormat(options.mtp)
    recipes = {
        "hybrid": Recipe(shared=TargetFormat.FP8, mtp=mtp),
        "head": Recipe(shared=TargetFormat.FP8, mtp=mtp, lm_head=TargetFormat.INT8),
    }
    plans = {name: plan_build(recipe, sources.opened(recipe)) for name, recipe in recipes.items()}
    # The base may be named as on the hub; this is where it lies.
    return _Checkpoints(plans["head"].sources.base.checkpoint.directory, directory, plans)


def _possible(rungs: "tuple[Rung, ...]", checkpoints: _Checkpoints) -> "Iterator[Rung]":
    for rung in rungs:
        if rung.drafts and not checkpoints.has_mtp(rung.checkpoint):
            typer.echo(f"{rung.key}: skipped, the base has no MTP head; give a source with --mtp-from")
        else:
            yield rung


def _bench_plan(
    rung: "Rung", checkpoints: _Checkpoints, options: LadderOptions, repeats: RepeatOptions, requests: RequestOptions
) -> "BenchPlan":
    """What a rung's server is asked, without the server."""
    from dataclasses import replace

    from onebox.bench.client import Connection
    from onebox.bench.measure import BenchPlan
    from onebox.bench.tasks import chosen_tasks
    from onebox.cli.bench_options import AnswerOptions

    settings = bench_settings(requests, repeats, AnswerOptions(ignore_eos=options.ignore_eos))
    # Every rung gets the same prompts: its server is a new one, which has none of them cached.
    settings = replace(settings, seed=_SEED if requests.seed is None else requests.seed)
    tasks = chosen_tasks(parse_names(options.workloads))
    told = {
        "rung": rung.key,
        "checkpoint": checkpoints.identity(rung.checkpoint),
        "serve_options": [*rung.serve_options, *shlex.split(options.serve_options)],
        "workloads": [task.key for task in tasks],
        "runs": settings.runs,
        "warm_ups": settings.warm_ups,
        "ignore_eos": settings.ignore_eos,
        "max_context": settings.max_context,
        "limit_s": settings.limit_s,
        "seed": settings.seed,
    }
    port = _free_port()
    connection = Connection(f"http://127.0.0.1:{port}")
    return BenchPlan(connection, settings, tasks, launch_patience_s=options.start_patience, ladder=told)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _measured(rung: "Rung", checkpoints: _Checkpoints, plan: "BenchPlan") -> "Run":
    """The rung's record: read if it is there, else measured and written."""
    import asyncio
    from dataclasses import replace

    from onebox.bench.ladder import read_rung, rung_path
    from onebox.bench.measure import measure
    from onebox.bench.record import write_run
    from onebox.cli import bench_view

    path = rung_path(checkpoints.directory, rung)
    known = read_rung(checkpoints.directory, rung, plan.ladder)
    if known is not None:
        typer.echo(f"{rung.key}: measured before, {path}")
        return known
    served = checkpoints.ready(rung.checkpoint)
    port = plan.connection.url.rpartition(":")[2]
    command = [sys.executable, "-m", "onebox.cli.main", "serve", str(served), "--port", port]
    launch = shlex.join([*command, *plan.ladder["serve_options"]])
    typer.echo(f"{rung.key}: {shlex.join(['onebox', *command[3:5], *plan.ladder['serve_options']])}")
    try:
        with bench_view.bars(len(plan.tasks)) as bars:
            run = asyncio.run(measure(replace(plan, launch=launch), bars, tuple(sys.argv)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPTED) from None
    if not run.is_success:
        bench_view.show(run)
        typer.echo(f"{rung.key} is not kept: run the same command again to measure it.", err=True)
        raise typer.Exit(INTERRUPTED if run.interrupted else FAILED)
    write_run(run, path)
    return run


def _show(rows: "list[LadderRow]", device: str, accepted: tuple[float, ...]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print()
    console.print(_table(rows))
    console.print()
    console.print(_workload_table(rows))
    console.print(
        f"tok/s is the mean of the workloads' decode speeds; in brackets, the 95% interval of a gain over "
        f"the runs. Projected by `onebox plan` for {device}: first at an acceptance of "
        f"{', '.join(f'{share:g}' for share in accepted)}, then as it was measured.",
        markup=False,
        soft_wrap=True,
    )


def _table(rows: "list[LadderRow]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = (
        *("step", "tok/s", "gain", "over base", "projected", "as accepted", "end to end", "warm", "tokens\na step"),
        *("TTFT", "GB a step", "weights GB", "KV tokens"),
    )
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(
            row.title,
            _number(row.decode_tok_s, ".1f"),
            _gain(row, _before(rows, row)),
            _number(row.gain_over_base, "+.1%"),
            _number(row.projected_tok_s, ".1f"),
            _number(row.projected_as_accepted_tok_s, ".1f"),
            _number(row.e2e_tok_s, ".1f"),
            _number(row.e2e_warm_tok_s, ".1f"),
            _number(row.tokens_per_step, ".2f"),
            "-" if row.ttft_s is None else f"{row.ttft_s * 1000:.0f} ms",
            "-" if row.step_bytes is None else f"{row.step_bytes / 1e9:.4g}",
            "-" if row.weights_bytes is None else f"{row.weights_bytes / 1e9:.4g}",
            _number(row.kv_tokens, ",d"),
        )
    return table


def _gain(row: "LadderRow", before: str) -> str:
    """The gain with its interval, and over which rung if that is not the one above."""
    if row.gain is None:
        return "-"
    ends = row.gain_interval
    interval = "" if ends is None else f" ({ends[0]:+.1%} to {ends[1]:+.1%})"
    return f"{row.gain:+.1%}{interval}" + ("" if row.over == before else f" over {row.over}")


def _before(rows: "list[LadderRow]", row: "LadderRow") -> str:
    place = rows.index(row)
    return rows[place - 1].key if place else ""


def _workload_table(rows: "list[LadderRow]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = list(dict.fromkeys(name for row in rows for name in row.by_workload))
    for place, name in enumerate(["decode tok/s", *names]):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(row.title, *(_number(row.by_workload.get(name), ".1f") for name in names))
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
