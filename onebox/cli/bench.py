"""`onebox bench`: measures any OpenAI-compatible server over HTTP.

Exit status 0: every request was answered whole. 1: something failed, whatever the figures look like. 130: Ctrl-C.
"""

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.compare import compare
from onebox.cli.decode import decode
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.bench.load import Loop
    from onebox.bench.measure import BenchPlan

__all__ = ["bench_app"]

FAILED = 1
INTERRUPTED = 130

bench_app = typer.Typer(
    help="Measure any OpenAI-compatible server: speed alone and under load, with failures first.", no_args_is_help=True
)
bench_app.command()(compare)
bench_app.command()(decode)

Url = Annotated[str, typer.Option(help="The server, with or without /v1.")]
ApiKey = Annotated[str | None, typer.Option(envvar="ONEBOX_API_KEY", help="The server's API key, if it asks for one.")]
Model = Annotated[str | None, typer.Option(help="Which of its models; the first unless told.")]
Output = Annotated[Path | None, typer.Option(help="Write the record here: JSON with every request's raw times.")]
AsJson = Annotated[bool, typer.Option("--json", help="Make the last line of stdout the result as JSON.")]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, help="Of prompts and arrival times; drawn anew unless told, so that no cache knows the prompts."
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Answers go on to their limit; else the model ends them itself.")
]
MaxContext = Annotated[int | None, typer.Option(min=256, help="Keep prompt and answer within so many tokens.")]
Stall = Annotated[
    float, typer.Option(min=0.1, help="Seconds without an event after which a stream that has begun has stalled.")
]
FirstToken = Annotated[float, typer.Option(min=0.1, help="The same for the first token.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds that one answer may take.")]
Launch = Annotated[
    str, typer.Option(help='Start the server with this command first, and time it: "onebox serve --port 8000".')
]
Runs = Annotated[int, typer.Option(min=1, help="Measured runs; the median is shown.")]
WarmUps = Annotated[int, typer.Option(min=0, help="Requests before them, of each kind, that are in no figure.")]
Limit = Annotated[
    float | None, typer.Option(min=0.1, help="Seconds after which a workload begins no further run; one it always has.")
]
Mixes = Annotated[str, typer.Option(help="Of uniform_short, mixed_typical, long_only, agent; with commas, or all.")]
Concurrency = Annotated[str, typer.Option(help="Clients at once; several with commas.")]
Count = Annotated[int | None, typer.Option(min=1, help="Requests in all (agent: conversations).")]
Duration = Annotated[float | None, typer.Option(min=0.1, help="Seconds; 90 unless --count is given.")]
SloText = Annotated[str, typer.Option("--slo", help="What a good answer holds: ttft=2s,itl=100ms,tpot=50ms,e2e=30s.")]

_URL = "http://127.0.0.1:8000"
_DURATION_S = 90.0


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
def run(
    url: Url = _URL,
    workloads: Annotated[
        str,
        typer.Option(help="Sets (short, docai, modes), single workloads such as qa or rag-8k, or all; with commas."),
    ] = "short",
    runs: Runs = 3,
    warm_ups: WarmUps = 1,
    mixes: Mixes = "",
    concurrency: Concurrency = "4",
    count: Count = None,
    duration: Duration = None,
    slo: SloText = "",
    ignore_eos: IgnoreEos = False,
    limit: Limit = None,
    max_context: MaxContext = None,
    seed: Seed = None,
    output: Output = None,
    as_json: AsJson = False,
    launch: Launch = "",
    api_key: ApiKey = None,
    model: Model = None,
    stall: Stall = 120.0,
    first_token: FirstToken = 600.0,
    timeout: Timeout = 1800.0,
) -> None:
    """Single requests, one at a time: time to the first token cold and warm, decode speed, drafts kept."""
    from onebox.bench.client import Connection
    from onebox.bench.figures import Slo
    from onebox.bench.measure import BenchPlan
    from onebox.bench.session import BenchSettings
    from onebox.bench.tasks import chosen_tasks

    settings = BenchSettings(runs, warm_ups, ignore_eos, _seed(seed), limit, max_context, Slo.parse(slo))
    connection = Connection(url, api_key, model, stall, first_token, timeout)
    loads = _loads(mixes, _loops(concurrency, "", count, duration)) if mixes else ()
    _carry_out(BenchPlan(connection, settings, chosen_tasks(_names(workloads)), loads, launch=launch), output, as_json)


@bench_app.command()
def load(
    url: Url = _URL,
    mixes: Mixes = "uniform_short,mixed_typical",
    concurrency: Concurrency = "4",
    rate: Annotated[
        str, typer.Option(help="Open loop: arrivals a second, whether or not the server keeps up; several with commas.")
    ] = "",
    count: Count = None,
    duration: Duration = None,
    slo: SloText = "",
    warm_ups: WarmUps = 1,
    ignore_eos: IgnoreEos = False,
    max_context: MaxContext = None,
    seed: Seed = None,
    output: Output = None,
    as_json: AsJson = False,
    launch: Launch = "",
    api_key: ApiKey = None,
    model: Model = None,
    stall: Stall = 120.0,
    first_token: FirstToken = 600.0,
    timeout: Timeout = 1800.0,
) -> None:
    """Many requests at once: aggregate speed, percentiles of waiting, goodput under an objective."""
    from onebox.bench.client import Connection
    from onebox.bench.figures import Slo
    from onebox.bench.measure import BenchPlan
    from onebox.bench.session import BenchSettings

    settings = BenchSettings(1, warm_ups, ignore_eos, _seed(seed), None, max_context, Slo.parse(slo))
    connection = Connection(url, api_key, model, stall, first_token, timeout)
    loads = _loads(mixes, _loops(concurrency, rate, count, duration))
    _carry_out(BenchPlan(connection, settings, loads=loads, launch=launch), output, as_json)


@bench_app.command()
def sweep(
    url: Url = _URL,
    pp: Annotated[str, typer.Option(help="Prompt tokens; several with commas.")] = "2048",
    tg: Annotated[str, typer.Option(help="Answer tokens, kept exactly; several with commas.")] = "128",
    depth: Annotated[
        str, typer.Option(help="Tokens of context before the prompt; several with commas, or arena for Spark Arena's.")
    ] = "0",
    concurrency: Concurrency = "1",
    runs: Runs = 3,
    warm_ups: WarmUps = 1,
    limit: Limit = None,
    max_context: MaxContext = None,
    seed: Seed = None,
    output: Output = None,
    as_json: AsJson = False,
    launch: Launch = "",
    api_key: ApiKey = None,
    model: Model = None,
    stall: Stall = 120.0,
    first_token: FirstToken = 600.0,
    timeout: Timeout = 1800.0,
) -> None:
    """The table of Spark Arena: prompts and answers of given lengths, by depth of context and concurrency."""
    from onebox.bench.client import Connection
    from onebox.bench.measure import BenchPlan
    from onebox.bench.session import BenchSettings
    from onebox.bench.sweep import ARENA_DEPTHS, cells

    depths = ARENA_DEPTHS if depth == "arena" else _numbers("--depth", depth, 0)
    table = cells(_numbers("--pp", pp), _numbers("--tg", tg), depths, _numbers("--concurrency", concurrency))
    settings = BenchSettings(runs, warm_ups, True, _seed(seed), limit, max_context)
    connection = Connection(url, api_key, model, stall, first_token, timeout)
    _carry_out(BenchPlan(connection, settings, cells=table, launch=launch), output, as_json)


@bench_app.command("all")
def measure_all(
    url: Url = _URL,
    runs: Runs = 3,
    warm_ups: WarmUps = 1,
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals a second of the open loop.")] = 1.0,
    slo: SloText = "ttft=2s,itl=100ms",
    ignore_eos: IgnoreEos = False,
    limit: Limit = 30.0,
    max_context: MaxContext = None,
    seed: Seed = None,
    output: Output = None,
    as_json: AsJson = False,
    launch: Launch = "",
    api_key: ApiKey = None,
    model: Model = None,
    stall: Stall = 120.0,
    first_token: FirstToken = 600.0,
    timeout: Timeout = 1800.0,
) -> None:
    """The whole set: every workload alone, every mix in a closed loop, one open loop, and a small sweep."""
    from onebox.bench.client import Connection
    from onebox.bench.figures import Slo
    from onebox.bench.load import Loop
    from onebox.bench.measure import BenchPlan
    from onebox.bench.session import BenchSettings
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
        Connection(url, api_key, model, stall, first_token, timeout),
        BenchSettings(runs, warm_ups, ignore_eos, _seed(seed), limit, max_context, Slo.parse(slo)),
        chosen_tasks(["all"]),
        loads,
        cells((2048,), (128,), (0, 4096), (1, 2)),
        launch,
    )
    _carry_out(plan, output, as_json)


@bench_app.command()
def show(record: Annotated[Path, typer.Argument(help="A record that --output wrote.")]) -> None:
    """Show a record's tables again."""
    from onebox.bench.record import read_run
    from onebox.cli import bench_view

    bench_view.show(read_run(record))


@bench_app.command()
def export(
    form: Annotated[str, typer.Argument(help="llama-benchy (of a sweep) or vllm-bench (of one load).")],
    record: Annotated[Path, typer.Argument(help="A record that --output wrote.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
    load_name: Annotated[str | None, typer.Option("--load", help="Which load, where there are several.")] = None,
) -> None:
    """Write a record as another tool's JSON."""
    from onebox.bench.export import as_llama_benchy, as_vllm_bench
    from onebox.bench.record import read_run, write_json

    made = read_run(record)
    match form:
        case "llama-benchy":
            write_json(as_llama_benchy(made), target)
        case "vllm-bench":
            write_json(as_vllm_bench(made, load_name), target)
        case _:
            raise UsageError(f"There is no form {form!r}; there are llama-benchy and vllm-bench.")
    typer.echo(f"{target} is written.")


def _carry_out(plan: "BenchPlan", output: Path | None, as_json: bool) -> None:
    """Measures, shows, writes, and leaves with the status that the result deserves."""
    import asyncio

    from onebox.bench.measure import measure
    from onebox.bench.record import write_run
    from onebox.cli import bench_view

    _refuse_unwritable(output)
    num_workloads = len(plan.tasks) + len(plan.loads) + len(plan.cells)
    try:
        with bench_view.bars(num_workloads) as bars:
            made = asyncio.run(measure(plan, bars, tuple(sys.argv)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        # Ctrl-C or SIGTERM before the first workload: there is nothing to keep.
        raise typer.Abort from None
    if output is not None:
        # Before anything is shown: a closed pipe must not cost the record.
        write_run(made, output)
    bench_view.show(made)
    if output is not None:
        typer.echo(f"The record is {output}.")
    if as_json:
        typer.echo(bench_view.json_line(made))
    if made.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not made.is_success:
        raise typer.Exit(FAILED)


def _refuse_unwritable(output: Path | None) -> None:
    """Known before minutes are spent on measuring."""
    import os

    if output is None:
        return
    if output.is_dir() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output is {output}, which cannot be written; name a file in a directory that exists.")


def _seed(given: int | None) -> int:
    return secrets.randbelow(2**31) if given is None else given


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _numbers(flag: str, text: str, least: int = 1) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in _names(text))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise UsageError(f"{flag} is {text!r}; give whole numbers from {least} up, with commas between them.")
    return found


def _loops(concurrency: str, rates: str, count: int | None, duration: float | None) -> "tuple[Loop, ...]":
    from onebox.bench.load import Loop

    if count is None and duration is None:
        duration = _DURATION_S
    if not rates:
        return tuple(Loop(each, None, count, duration) for each in _numbers("--concurrency", concurrency))
    try:
        found = tuple(float(part) for part in _names(rates))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise UsageError(f"--rate is {rates!r}; give arrivals a second, with commas between them.")
    return tuple(Loop(1, each, count, duration) for each in found)


def _loads(mixes: str, loops: "tuple[Loop, ...]") -> "tuple[tuple[str, Loop], ...]":
    from onebox.bench.load import MIXES

    names = list(MIXES) if mixes == "all" else _names(mixes)
    for name in names:
        if name not in MIXES:
            raise UsageError(f"There is no mix {name!r}; there are {', '.join(MIXES)}.")
    if not names:
        raise UsageError(f"--mixes is empty; there are {', '.join(MIXES)}.")
    return tuple((name, loop) for name in names for loop in loops)
