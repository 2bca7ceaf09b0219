"""`onebox fleet`: several servers behind one router, looked after together."""

import asyncio
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.fleet_simulate import simulate
from onebox.cli.json_output import echo_json
from onebox.spec.errors import OneboxError

if TYPE_CHECKING:
    from onebox.fleet.config import FleetConfig
    from onebox.fleet.fleet import Fleet

__all__ = ["fleet_app"]

fleet_app = typer.Typer(
    help="Serve with many boxes behind one address: vllm-router or LiteLLM in front of onebox servers.",
    no_args_is_help=True,
)

# Not ONEBOX_CONFIG: that is a server's file.
_Config = Annotated[
    Path,
    typer.Option("--config", envvar="ONEBOX_FLEET_CONFIG", help="The fleet's file; docs/scaleout.md describes it."),
]
_DEFAULT = Path("fleet.toml")
_ASK_S = 10.0


@fleet_app.command()
def up(
    path: _Config = _DEFAULT,
    check_only: Annotated[
        bool, typer.Option("--check", help="Check the members that run, print them and end.")
    ] = False,
) -> None:
    """Check the members, start the router in front of them and show all of it until Ctrl-C.

    Members with a `start` are started, restarted and stopped; the others are left alone. Exit code: 0 after Ctrl-C or
    SIGTERM, 1 where members are not alike or cannot be had, 2 where the file is wrong.
    """
    from onebox.fleet.config import read_fleet_config

    config = read_fleet_config(path)
    asyncio.run(_check(config) if check_only else _serve(config))


@fleet_app.command()
def status(
    path: _Config = _DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the members of a running fleet: load, hits, speed, health."""
    from onebox.cli.fleet_view import print_table

    answer = _admin(path, "GET", "/status")
    if as_json:
        echo_json(answer, indent=1)
    else:
        print_table(answer)


@fleet_app.command()
def drain(
    name: Annotated[str, typer.Argument(help="The member, by its name in the file.")],
    path: _Config = _DEFAULT,
    undo: Annotated[bool, typer.Option("--undo", help="Give it requests again.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until its requests have ended.")] = False,
) -> None:
    """Send a member no new requests, and wait until those that it has are answered. It goes on running."""
    member = _admin(path, "POST", f"/members/{name}/{'resume' if undo else 'drain'}")
    if undo:
        typer.echo(f"{name} takes requests again." if member["state"] == "up" else f"{name} is {member['state']}.")
        return
    while member["num_open"] and not no_wait:
        time.sleep(0.2)
        (member,) = [each for each in _admin(path, "GET", "/status")["members"] if each["name"] == name]
    left = f" {member['num_open']} requests are still running." if member["num_open"] else " Nothing is running on it."
    typer.echo(f"{name} is drained.{left}")


@fleet_app.command()
def roll(
    names: Annotated[
        list[str] | None, typer.Argument(help="Members; without names, all that the fleet starts.")
    ] = None,
    path: _Config = _DEFAULT,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Stop the old server before the new one starts: one fits the memory.")
    ] = False,
) -> None:
    """Replace members by what the file's start lines say now, one after the other, without losing a request.

    A new server boots beside the old one, is asked fixed prompts whose answers must be equal, takes the traffic, and
    the old one drains. Exit code 1 where a new one is refused; the old ones then go on.
    """
    query = f"?names={','.join(names or ())}&in_place={str(in_place).lower()}"
    state, shown = _admin(path, "POST", f"/roll{query}"), 0
    while True:
        for line in state["lines"][shown:]:
            typer.echo(line)
        shown = len(state["lines"])
        if state["is_done"]:
            break
        time.sleep(0.3)
        state = _admin(path, "GET", "/status")["roll"]
    if state["error"]:
        raise typer.Exit(1)


fleet_app.command()(simulate)


def _admin(path: Path, method: str, what: str) -> dict[str, Any]:
    """Asks the running fleet of that file."""
    import httpx

    from onebox.fleet.config import read_fleet_config
    from onebox.fleet.page import ADMIN_HEADER

    url = read_fleet_config(path).admin_url
    try:
        response = httpx.request(method, f"{url}{what}", headers={ADMIN_HEADER: "1"}, timeout=_ASK_S, trust_env=False)
        answer: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise OneboxError(
            f"No fleet answers at {url} ({reason}); start it with `onebox fleet up --config {path}`."
        ) from None
    if response.is_error:
        raise OneboxError(answer.get("error") or f"{url}{what} answered {response.status_code}.")
    return answer


async def _check(config: "FleetConfig") -> None:
    import httpx

    from onebox.cli.fleet_view import print_identities
    from onebox.fleet.member import Identity, read_identity, refuse_differences, refuse_open
    from onebox.spec.authorization import authorization

    found: dict[str, Identity] = {}
    missing = []
    async with httpx.AsyncClient(headers=authorization(config.api_key), trust_env=False) as http:
        for member in config.members:
            try:
                if member.url:
                    found[member.name] = await read_identity(http, member.url)
            except OneboxError as error:
                if not member.is_owned:
                    missing.append(f"{member.name}: {error}")
            if member.is_owned and member.name not in found:
                typer.echo(f"{member.name} is not running; `onebox fleet up` starts and checks it.")
        print_identities(found)
        for member in config.members:
            if config.needs_keys and member.url and member.name in found:
                await refuse_open(http, member.name, member.url)
    refuse_differences(found)
    if missing:
        raise OneboxError("\n".join(missing))


async def _serve(config: "FleetConfig") -> None:
    from onebox.cli.fleet_view import FleetView
    from onebox.fleet.fleet import open_fleet

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def stop() -> None:
        """The first signal ends the fleet in order; while it starts, or at the second one, at once."""
        if main and (stopping.is_set() or not view.is_serving):
            main.cancel()
        stopping.set()

    view = FleetView(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        async with open_fleet(config, view.say) as fleet:
            await _show(fleet, view, stopping)
            view.say("Stopping: what is running may finish; Ctrl-C again ends it.")
    except asyncio.CancelledError:
        if not stopping.is_set():
            raise
    view.say("Stopped.")


async def _show(fleet: "Fleet", view: Any, stopping: asyncio.Event) -> None:
    with view.serving(fleet):
        while not stopping.is_set():
            view.update(fleet.status())
            try:
                async with asyncio.timeout(fleet.config.poll_s):
                    await stopping.wait()
            except TimeoutError:
                continue
