"""`onebox fleet simulate`: how many boxes, what affinity is worth, what a rolling update costs, on paper."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.json_output import echo_json
from onebox.cli.options import grouped, option_group
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.fleet.step_times import StepTimes
    from onebox.fleet.study import FleetFigures, StudyResult
    from onebox.fleet.traffic import Turn, UserTraffic

__all__ = ["simulate"]


@option_group("Members")
class MemberOptions:
    """What a member's steps take."""

    steps: Annotated[
        Path | None, typer.Option(help="File with a member's step times, as --measure writes it to --save.")
    ] = None
    measure: Annotated[
        list[str] | None,
        typer.Option(help="Measure a server that has nothing else to do; several: they share one machine."),
    ] = None
    api_key: Annotated[
        str, typer.Option(envvar="ONEBOX_API_KEY", help="The API key of the servers that are measured.")
    ] = ""
    save: Annotated[Path | None, typer.Option(help="Where the measured step times are written.")] = None


@option_group("Load")
class TrafficOptions:
    """Who asks, and for how long."""

    trace: Annotated[Path | None, typer.Option(help="A trace instead of a mix: JSON lines, or Azure's CSV.")] = None
    # None where it is not given, because a trace takes none of these.
    mix: Annotated[str | None, typer.Option(help="A mix of `onebox bench load`; default agent.")] = None
    users: Annotated[
        int | None, typer.Option(help="Users of the mix, each with one request at a time; default 20.")
    ] = None
    think: Annotated[
        float | None, typer.Option(help="Mean seconds between an answer and its user's next request; default 10.")
    ] = None
    seconds: Annotated[float | None, typer.Option(help="How long the users send; default 600.")] = None

    def traffic(self) -> "tuple[UserTraffic | Sequence[Turn], float, str]":
        """Who asks, for how many seconds, and both in words."""
        from onebox.fleet.traffic import UserTraffic, read_trace

        if self.trace:
            given = {"--mix": self.mix, "--users": self.users, "--think": self.think, "--seconds": self.seconds}
            ignored = [name for name, value in given.items() if value is not None]
            if ignored:
                raise UsageError(f"A trace says who asks and when: leave out {', '.join(ignored)} with --trace.")
            return read_trace(self.trace), 0.0, f"the trace {self.trace.name}"
        mix = "agent" if self.mix is None else self.mix
        users = 20 if self.users is None else self.users
        think = 10.0 if self.think is None else self.think
        seconds = 600.0 if self.seconds is None else self.seconds
        if seconds <= 0 or think < 0:
            raise UsageError("--seconds must be above 0, --think not below.")
        return UserTraffic(mix, users, think), seconds, f"{users} users of {mix}, {think:g} s between two requests"


@grouped
def simulate(
    members: MemberOptions,
    load: TrafficOptions,
    boxes: Annotated[str, typer.Option(help="Numbers of boxes to try, such as 1-8 or 2,4,8.")] = "1-6",
    policy: Annotated[str, typer.Option(help="affinity, session, least_loaded, round_robin or random.")] = "affinity",
    first_token: Annotated[float, typer.Option(help="Seconds in which nine of ten first tokens must come.")] = 2.0,
    roll: Annotated[float | None, typer.Option(help="Seconds that a box is away in a rolling update.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Simulate a fleet by its members' measured step times, for users of a mix or for a trace."""
    from onebox.fleet.simulation import POLICIES
    from onebox.fleet.study import FleetStudy

    counts = _numbers(boxes)
    if first_token <= 0 or (roll is not None and roll < 0):
        raise UsageError("--first-token must be above 0, --roll not below.")
    if policy not in POLICIES:
        raise UsageError(f"--policy is {policy!r}; give one of {', '.join(POLICIES)}.")
    traffic, seconds, who = load.traffic()
    times = _times(members)
    result = FleetStudy(times, traffic, seconds).answer(counts, policy, first_token, roll)
    if as_json:
        echo_json({"steps": asdict(times), **asdict(result)}, indent=1)
        return
    _print(result, who, first_token, roll)


def _times(members: MemberOptions) -> "StepTimes":
    from onebox.fleet.measure import measure_step_times
    from onebox.fleet.step_times import read_step_times, write_step_times

    if (members.steps is None) == (not members.measure):
        raise UsageError("Give either --steps FILE or --measure URL: what a member's steps take.")
    if members.steps:
        if members.save:
            raise UsageError("--save is for what --measure finds; leave it out with --steps.")
        return read_step_times(members.steps)
    if members.save and not members.save.parent.is_dir():
        raise UsageError(f"--save {members.save}: there is no directory {members.save.parent}.")
    urls = [url.rstrip("/").removesuffix("/v1") for url in members.measure or ()]
    times = asyncio.run(measure_step_times(urls, api_key=members.api_key))
    if members.save:
        write_step_times(times, members.save)
    return times


def _numbers(text: str) -> list[int]:
    try:
        found: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        found = sorted(set(found))
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 1000:
        raise UsageError(f"--boxes is {text!r}; give numbers such as 1-8 or 2,4,8.")
    return found


def _print(result: "StudyResult", who: str, first_token_s: float, down_s: float | None) -> None:
    _print_table(f"Boxes for {who}", result.by_boxes, with_boxes=True)
    target = f"nine of ten first tokens within {first_token_s:g} s"
    if result.enough:
        typer.echo(f"{result.enough} {'box' if result.enough == 1 else 'boxes'}: {target}.\n")
    else:
        typer.echo(f"{result.by_boxes[-1].boxes} boxes are not enough for {target}.\n")
    if len(result.by_policy) > 1:
        _print_table(f"What affinity is worth, {result.by_policy[0].boxes} boxes", result.by_policy)
    if result.updated:
        usual = result.by_policy[0]
        _print_table(f"A rolling update, each box {down_s:g} s away", [usual, result.updated], names=("none", "update"))


def _print_table(
    title: str, rows: "list[FleetFigures]", *, with_boxes: bool = False, names: tuple[str, ...] = ()
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("boxes" if with_boxes else "", justify="right" if with_boxes else "left")
    for name in ("requests", "first p50", "p90", "p99 s", "whole p50 s", "tok/s each", "tok/s all", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        label = str(row.boxes) if with_boxes else names[number] if names else row.policy
        waits = [f"{value:.2f}" for value in (row.first_p50_s, row.first_p90_s, row.first_p99_s, row.total_p50_s)]
        speeds = [f"{row.stream_tokens_per_s:.1f}", f"{row.tokens_per_s:.1f}", f"{100 * row.hit_share:.0f}%"]
        table.add_row(label, f"{row.num_requests:,}", *waits, *speeds)
    Console(width=110, highlight=False).print(table)
    typer.echo("")
