"""`onebox bench`: measures any OpenAI-compatible server over HTTP.

Exit status 0: every request was answered completely. 1: at least one failure, regardless of the figures. 130: Ctrl-C.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.bench_options import (
    AnswerOptions,
    Concurrency,
    ConnectionOptions,
    LoadOptions,
    PriceOptions,
    RecordOptions,
    RepeatOptions,
    RequestOptions,
    bench_settings,
    parse_names,
    parse_numbers,
)
from onebox.cli.compare import compare
from onebox.cli.decode import decode
from onebox.cli.json_output import echo_json
from onebox.cli.ladder import ladder
from onebox.cli.mixed import mixed
from onebox.cli.options import grouped
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.bench.measure import BenchPlan

__all__ = ["bench_app"]

FAILED = 1
INTERRUPTED = 130

bench_app = typer.Typer(
    help="Measure any OpenAI-compatible server: single-stream speed and speed under load; failures first.",
    no_args_is_help=True,
)
bench_app.command()(compare)
bench_app.command()(decode)
bench_app.command()(ladder)
bench_app.command()(mixed)


@bench_app.callback(invoke_without_command=True)
def _bench(
    context: typer.Context,
    compared: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", metavar="A B", help="The same as onebox bench compare A B.")
    ] = None,
) -> None:
    if compared is not None:
        context.invoke(compare, first=compared[0], second=compared[1])


@bench_app.command()
@grouped
def run(
    server: ConnectionOptions,
    repeats: RepeatOptions,
    requests: RequestOptions,
    answers: AnswerOptions,
    load: LoadOptions,
    cost: PriceOptions,
    record: RecordOptions,
    workloads: Annotated[
        str,
        typer.Option(
            help="Sets (short, docai, modes), single workloads such as qa or rag-8k, or all; comma-separated."
        ),
    ] = "short",
) -> None:
    """Single requests, one at a time: time to the first token cold and warm, decode speed, accepted drafts."""
    from onebox.bench.measure import BenchPlan
    from onebox.bench.tasks import chosen_tasks

    settings = bench_settings(requests, repeats, answers, cost)
    loads = load.loads() if load.mixes else ()
    tasks = chosen_tasks(parse_names(workloads))
    _carry_out(BenchPlan(server.connection(), settings, tasks, loads, launch=server.launch), record)


@bench_app.command()
@grouped
def load(
    server: ConnectionOptions,
    requests: RequestOptions,
    answers: AnswerOptions,
    cost: PriceOptions,
    record: RecordOptions,
    load: LoadOptions = LoadOptions(mixes="uniform_short,mixed_typical"),
    rate: Annotated[
        str, typer.Option(help="Open loop: arrivals per second, independent of the server's progress; comma-separated.")
    ] = "",
) -> None:
    """Concurrent requests: aggregate speed, latency percentiles, goodput under an SLO."""
    from onebox.bench.measure import BenchPlan

    settings = bench_settings(requests, RepeatOptions(runs=1), answers, cost)
    _carry_out(BenchPlan(server.connection(), settings, loads=load.loads(rate), launch=server.launch), record)


@bench_app.command()
@grouped
def sweep(
    server: ConnectionOptions,
    repeats: RepeatOptions,
    requests: RequestOptions,
    cost: PriceOptions,
    record: RecordOptions,
    pp: Annotated[str, typer.Option(help="Prompt tokens; comma-separated.")] = "2048",
    tg: Annotated[str, typer.Option(help="Answer tokens, generated exactly; comma-separated.")] = "128",
    depth: Annotated[
        str, typer.Option(help="Tokens of context before the prompt; comma-separated, or arena for Spark Arena's.")
    ] = "0",
    concurrency: Concurrency = "1",
) -> None:
    """The table of Spark Arena: prompts and answers of given lengths, by depth of context and concurrency."""
    from onebox.bench.measure import BenchPlan
    from onebox.bench.sweep import ARENA_DEPTHS, cells

    depths = ARENA_DEPTHS if depth == "arena" else parse_numbers("--depth", depth, 0)
    clients = parse_numbers("--concurrency", concurrency)
    table = cells(parse_numbers("--pp", pp), parse_numbers("--tg", tg), depths, clients)
    settings = bench_settings(requests, repeats, AnswerOptions(ignore_eos=True), cost)
    _carry_out(BenchPlan(server.connection(), settings, cells=table, launch=server.launch), record)


@bench_app.command("all")
@grouped
def measure_all(
    server: ConnectionOptions,
    requests: RequestOptions,
    cost: PriceOptions,
    record: RecordOptions,
    repeats: RepeatOptions = RepeatOptions(limit=30.0),
    answers: AnswerOptions = AnswerOptions(slo="ttft=2s,itl=100ms"),
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals per second of the open loop.")] = 1.0,
) -> None:
    """The complete set: every workload alone, every mix in a closed loop, one open loop, and a small sweep."""
    from onebox.bench.load import Loop
    from onebox.bench.measure import BenchPlan
    from onebox.bench.sweep import cells
    from onebox.bench.tasks import chosen_tasks

    loads = (
        ("uniform_short", Loop(4, count=16)),
        ("uniform_short", Loop(rate=rate, count=16)),
        ("mixed_typical", Loop(4, count=12)),
        ("long_only", Loop(2, count=2)),
        ("agent", Loop(2, count=2)),
    )
    plan = BenchPlan(
        server.connection(),
        bench_settings(requests, repeats, answers, cost),
        chosen_tasks(["all"]),
        loads,
        cells((2048,), (128,), (0, 4096), (1, 2)),
        server.launch,
    )
    _carry_out(plan, record)


@bench_app.command()
@grouped
def show(
    cost: PriceOptions,
    record: Annotated[Path, typer.Argument(help="A record written by --output.")],
) -> None:
    """Show a record's tables again, with other prices if given."""
    from onebox.bench.record import read_run
    from onebox.cli import bench_view

    given = cost.prices()
    bench_view.show(read_run(record), given if given.is_set else None)


@bench_app.command()
def export(
    form: Annotated[str, typer.Argument(help="llama-benchy (of a sweep) or vllm-bench (of one load).")],
    record: Annotated[Path, typer.Argument(help="A record written by --output.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
    load_name: Annotated[str | None, typer.Option("--load", help="Which load, if the record has several.")] = None,
) -> None:
    """Convert a record to another tool's JSON."""
    from onebox.bench.export import as_llama_benchy, as_vllm_bench
    from onebox.bench.record import read_run, write_json

    made = read_run(record)
    match form:
        case "llama-benchy":
            write_json(as_llama_benchy(made), target)
        case "vllm-bench":
            write_json(as_vllm_bench(made, load_name), target)
        case _:
            raise UsageError(f"There is no format {form!r}; there are llama-benchy and vllm-bench.")
    typer.echo(f"Written to {target}.")


def _carry_out(plan: "BenchPlan", record: RecordOptions) -> None:
    """Measures, shows and writes the result, and exits with the matching status."""
    import asyncio

    from onebox.bench.measure import measure
    from onebox.bench.record import write_run
    from onebox.cli import bench_view

    record.refuse_unwritable()
    num_workloads = len(plan.tasks) + len(plan.loads) + len(plan.cells)
    try:
        with bench_view.bars(num_workloads) as bars:
            made = asyncio.run(measure(plan, bars, tuple(sys.argv)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        # Ctrl-C or SIGTERM before the first workload: there is no record to keep.
        raise typer.Abort from None
    if record.output is not None:
        # Written before printing: a closed pipe must not lose the record.
        write_run(made, record.output)
    if record.as_json:
        echo_json(bench_view.summary(made))
    else:
        bench_view.show(made)
    if record.output is not None:
        typer.echo(f"The record was written to {record.output}.")
    if made.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not made.is_success:
        raise typer.Exit(FAILED)
