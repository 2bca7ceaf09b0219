"""Options shared by the `onebox bench` commands, by topic, and their conversion to settings."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.options import option_group
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.bench.client import Connection
    from onebox.bench.cost import Prices
    from onebox.bench.load import Loop
    from onebox.bench.session import BenchSettings

__all__ = [
    "AnswerOptions",
    "Concurrency",
    "ConnectionOptions",
    "LoadOptions",
    "PriceOptions",
    "RecordOptions",
    "RepeatOptions",
    "RequestOptions",
    "bench_settings",
    "parse_names",
    "parse_numbers",
]

_DURATION_S = 90.0

Concurrency = Annotated[str, typer.Option(help="Concurrent clients; comma-separated.")]


@option_group("Server")
class ConnectionOptions:
    """The server to measure and its timeouts."""

    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000"
    api_key: Annotated[
        str | None, typer.Option(envvar="ONEBOX_API_KEY", help="The server's API key, if it needs one.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Model name; default: the first listed.")] = None
    launch: Annotated[
        str, typer.Option(help='Start the server with this command and time the start: "onebox serve --port 8000".')
    ] = ""
    stall: Annotated[
        float, typer.Option(min=0.1, help="Seconds without an event after which a started stream counts as stalled.")
    ] = 120.0
    first_token: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a first token after which a request counts as stalled.")
    ] = 600.0
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of one answer in seconds.")] = 1800.0

    def connection(self) -> "Connection":
        from onebox.bench.client import Connection

        return Connection(self.url, self.api_key, self.model, self.stall, self.first_token, self.timeout)


@option_group("Requests")
class RequestOptions:
    """Settings of all requests of a measurement."""

    warm_ups: Annotated[
        int, typer.Option(min=0, help="Warm-up requests of each kind, sent first and excluded from all figures.")
    ] = 1
    max_context: Annotated[int | None, typer.Option(min=256, help="Limit prompt plus answer to this many tokens.")] = (
        None
    )
    idle: Annotated[
        float,
        typer.Option(min=0, help="Seconds before the first request in which a local server's watts and CPU are read."),
    ] = 3.0
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of prompts and arrival times; default: random, so that no prompt is cached."),
    ] = None


@option_group("Repetitions")
class RepeatOptions:
    """Repetitions of a workload."""

    runs: Annotated[int, typer.Option(min=1, help="Measured runs; the median is shown.")] = 3
    limit: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds after which a workload starts no further run; the first always runs."),
    ] = None


@option_group("Answers")
class AnswerOptions:
    """When an answer ends, and the SLO."""

    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate each answer to its token limit; otherwise the model ends it.")
    ] = False
    slo: Annotated[str, typer.Option("--slo", help="SLO limits of a request: ttft=2s,itl=100ms,tpot=50ms,e2e=30s.")] = (
        ""
    )


@option_group("Cost")
class PriceOptions:
    """Prices, all in one currency."""

    price_kwh: Annotated[
        float | None, typer.Option(min=0, help="Price of a kWh, for the cost of a million tokens, in any currency.")
    ] = None
    price_hardware: Annotated[float | None, typer.Option(min=0, help="Price of the box, spread over its lifetime.")] = (
        None
    )
    lifetime_years: Annotated[float, typer.Option(min=0.01, help="Lifetime of the box.")] = 3.0
    price_api: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a million tokens elsewhere: after how many days the box is paid for."),
    ] = None

    def prices(self) -> "Prices":
        from onebox.bench.cost import Prices

        return Prices(self.price_kwh, self.price_hardware, self.lifetime_years, self.price_api)


@option_group("Load")
class LoadOptions:
    """The mixes to run and their length."""

    mixes: Annotated[
        str, typer.Option(help="Of uniform_short, mixed_typical, long_only, agent; comma-separated, or all.")
    ] = ""
    concurrency: Concurrency = "4"
    count: Annotated[int | None, typer.Option(min=1, help="Total requests (agent: conversations).")] = None
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds; 90 unless --count is given.")] = None

    def loads(self, rates: str = "") -> "tuple[tuple[str, Loop], ...]":
        """Each mix with each loop; `rates` (arrivals per second) selects open loops."""
        from onebox.bench.load import MIXES

        loops = self._loops(rates)
        names = list(MIXES) if self.mixes == "all" else parse_names(self.mixes)
        for name in names:
            if name not in MIXES:
                raise UsageError(f"There is no mix {name!r}; there are {', '.join(MIXES)}.")
        if not names:
            raise UsageError(f"--mixes is empty; there are {', '.join(MIXES)}.")
        return tuple((name, loop) for name in names for loop in loops)

    def _loops(self, rates: str) -> "tuple[Loop, ...]":
        from onebox.bench.load import Loop

        duration = _DURATION_S if self.count is None and self.duration is None else self.duration
        if not rates:
            clients = parse_numbers("--concurrency", self.concurrency)
            return tuple(Loop(each, None, self.count, duration) for each in clients)
        try:
            found = tuple(float(part) for part in parse_names(rates))
        except ValueError:
            found = ()
        if not found or min(found) <= 0:
            raise UsageError(f"--rate is {rates!r}; give arrivals per second, comma-separated.")
        return tuple(Loop(1, each, self.count, duration) for each in found)


@option_group("Result")
class RecordOptions:
    """Output of the result."""

    output: Annotated[Path | None, typer.Option(help="Write the record here: JSON with every request's raw times.")] = (
        None
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False

    def refuse_unwritable(self) -> None:
        """Checks the output path before measuring for minutes."""
        path = self.output
        if path is None:
            return
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(f"--output is {path}, which cannot be written; name a file in a directory that exists.")


def bench_settings(
    requests: RequestOptions, repeats: RepeatOptions, answers: AnswerOptions, cost: PriceOptions | None = None
) -> "BenchSettings":
    """Settings shared by all workloads of a run."""
    from onebox.bench.cost import Prices
    from onebox.bench.figures import Slo
    from onebox.bench.session import BenchSettings

    return BenchSettings(
        runs=repeats.runs,
        warm_ups=requests.warm_ups,
        ignore_eos=answers.ignore_eos,
        seed=secrets.randbelow(2**31) if requests.seed is None else requests.seed,
        limit_s=repeats.limit,
        max_context=requests.max_context,
        slo=Slo.parse(answers.slo),
        idle_s=requests.idle,
        prices=cost.prices() if cost else Prices(),
    )


def parse_names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def parse_numbers(flag: str, text: str, least: int = 1) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in parse_names(text))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise UsageError(f"{flag} is {text!r}; give whole numbers from {least} up, comma-separated.")
    return found
