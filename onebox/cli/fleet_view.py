"""A fleet as people see it: a table that is renewed in a terminal, lines about what changes elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from onebox.fleet.config import FleetConfig
    from onebox.fleet.fleet import Fleet
    from onebox.fleet.member import Identity

__all__ = ["FleetView", "print_identities", "print_table"]

_COLUMNS = ("open", "running", "waiting", "KV", "hits", "tok/s", "prompt tok/s", "answered", "cut")
_WIDTH = 130


class FleetView:
    """What `onebox fleet up` prints."""

    def __init__(self, config: "FleetConfig") -> None:
        self._config = config
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._states: dict[str, str] = {}
        self.is_serving = False

    def say(self, line: str) -> None:
        if self._live:
            self._live.console.print(line, markup=False, soft_wrap=True)
        else:
            typer.echo(line)

    @contextmanager
    def serving(self, fleet: "Fleet") -> Iterator[None]:
        """While it serves, the table is live in a terminal; elsewhere it is printed once."""
        self.is_serving = True
        status = fleet.status()
        where = " and this machine's other addresses" if self._config.listens_everywhere else ""
        self.say(f"Ready: {self._config.router} at {self._config.url}/v1{where}, page at {self._config.admin_url}/")
        self._states = {member["name"]: member["state"] for member in status["members"]}
        if not self._console.is_terminal:
            print_table(status)
            yield
            return
        with Live(_table(status), console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def update(self, status: dict[str, Any]) -> None:
        """Renews the table; a member whose state changed gets a line."""
        for member in status["members"]:
            before = self._states.get(member["name"])
            if before != member["state"]:
                why = f": {member['message']}" if member["message"] else "."
                self.say(f"{member['name']} was {before} and is {member['state']}{why}")
                self._states[member["name"]] = member["state"]
        if self._live:
            self._live.update(_table(status), refresh=True)


def print_table(status: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_table(status))


def print_identities(found: "dict[str, Identity]") -> None:
    """What members are, before the fleet starts."""
    if not found:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("member", "model", "fingerprint", "version", "context"):
        table.add_column(name, justify="right" if name == "context" else "left")
    for name, each in found.items():
        table.add_row(name, each.model, each.fingerprint[:12], each.version, f"{each.context:,}")
    Console(highlight=False, width=_WIDTH).print(table)


def _table(status: dict[str, Any]) -> Table:
    router = status["router"]
    running = "running" if router["is_running"] else "NOT RUNNING"
    title = f"{router['name']} ({router['policy']}) at {router['url']}/v1, {running}; {', '.join(status['model'])}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("member", "state", "version"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for member in status["members"]:
        table.add_row(member["name"], member["state"], member["version"] or "", *_figures(member))
    sums = {name: sum(member[name] for member in status["members"]) for name in _SUMS}
    table.add_row("all", "", "", *_figures({**sums, "kv_share": None, "hit_share": None}), style="bold")
    return table


_SUMS = ("num_open", "num_running", "num_waiting", "generated_per_s", "prompt_per_s", "num_answered", "num_cut")


def _figures(row: dict[str, Any]) -> list[str]:
    shares = ["" if row[name] is None else f"{100 * row[name]:.0f}%" for name in ("kv_share", "hit_share")]
    counts = [f"{row[name]:.0f}" for name in ("num_open", "num_running", "num_waiting")]
    speeds = [f"{row[name]:.1f}" for name in ("generated_per_s", "prompt_per_s")]
    return [*counts, *shares, *speeds, f"{row['num_answered']:,}", f"{row['num_cut']:,}"]
