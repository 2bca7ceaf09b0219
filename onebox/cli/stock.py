"""`onebox list`, `ps`, `stop` and `rm`: what lies on this machine, what runs, since when, how large."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from onebox.cli.json_output import echo_json
from onebox.spec.errors import UnreadableError, UnsupportedError, UsageError, WriteError
from onebox.spec.places import forget_place, known_places
from onebox.spec.running import RunningServer, running_servers

__all__ = ["list_checkpoints", "processes", "remove", "stop"]

_GIB = 2**30
_MODELS = Path("models")
_NAME_HELP = "A model's name, its directory, the process number or the port, as `onebox ps` shows them."
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")]


@dataclass(frozen=True)
class _Checkpoint:
    name: str
    directory: Path
    num_bytes: int
    kind: str
    changed: float


def list_checkpoints(
    directory: Annotated[Path, typer.Option("--dir", help="A directory to look into as well.")] = _MODELS,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints on this machine: those of --dir, what onebox fetched, built or served, the hub's cache."""
    found = _checkpoints(directory)
    if as_json:
        objects = [{"name": c.name, "directory": str(c.directory), "bytes": c.num_bytes, "kind": c.kind} for c in found]
        echo_json(objects)
    elif not found:
        typer.echo(
            "No checkpoint is here yet: `onebox up qwen3.5-122b-a10b` fetches and builds one; `onebox serve` alone"
        )
        typer.echo("serves the pocket model that ships with onebox.")
    else:
        rows = [(c.name, f"{c.num_bytes / 1e9:.1f} GB", c.kind, _ago(c.changed), str(c.directory)) for c in found]
        _print_table(("NAME", "SIZE", "KIND", "CHANGED", "DIRECTORY"), rows)


def processes(as_json: AsJson = False) -> None:
    """List the servers that run on this machine: address, model, since when, memory."""
    found = running_servers()
    if as_json:
        echo_json([{**vars(one), "resident_bytes": one.resident_bytes} for one in found])
    elif not found:
        typer.echo("No onebox serves on this machine.")
    else:
        rows = [
            (
                str(one.process_id),
                one.model,
                one.url,
                _ago(one.since),
                f"{one.planned_bytes / _GIB:.1f} GiB",
                f"{one.resident_bytes / _GIB:.1f} GiB",
            )
            for one in found
        ]
        _print_table(("PID", "MODEL", "URL", "SINCE", "PLANNED", "RESIDENT"), rows)


def stop(
    server: Annotated[str | None, typer.Argument(help=_NAME_HELP)] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all servers of this machine.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Seconds to wait until it has ended.")
    ] = 60.0,
) -> None:
    """Stop a server: running answers are finished first. Without a name the only one that runs."""
    for one in _chosen(server, every=every):
        try:
            os.kill(one.process_id, signal.SIGTERM)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise WriteError(
                f"Process {one.process_id} is another user's: stop it as that user, or with sudo."
            ) from None
        deadline = time.monotonic() + timeout
        while one.is_alive and time.monotonic() < deadline:
            time.sleep(0.05)
        if one.is_alive:
            raise UnsupportedError(
                f"{one.model} (process {one.process_id}) still runs after {timeout:.0f} s; run the same again to end "
                "it at once."
            )
        typer.echo(f"Stopped {one.model} ({one.url}).")


def remove(
    checkpoint: Annotated[str, typer.Argument(help="A name or directory, as `onebox list` shows them.")],
    directory: Annotated[Path, typer.Option("--dir", help="A directory to look into as well.")] = _MODELS,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a checkpoint from this disk. What is being served is refused."""
    found = [one for one in _checkpoints(directory) if checkpoint in (one.name, str(one.directory))]
    given = Path(checkpoint)
    found = found or [one for one in _checkpoints(directory) if given.exists() and one.directory == given.resolve()]
    if not found:
        raise UnreadableError(f"{checkpoint} is no checkpoint of this machine; `onebox list` shows them.")
    if len(found) > 1:
        raise UsageError(f"{checkpoint} names {len(found)} checkpoints; give the directory of one: `onebox list`.")
    (one,) = found
    _refuse_served(one)
    if not yes and not typer.confirm(f"Delete {one.directory} ({one.num_bytes / 1e9:.1f} GB)?"):
        raise typer.Abort
    _delete(one)
    forget_place(one.directory)
    typer.echo(f"Deleted {one.directory}: {one.num_bytes / 1e9:.1f} GB.")


def _chosen(name: str | None, *, every: bool) -> list[RunningServer]:
    found = running_servers()
    if every:
        return found
    if name is not None:
        port = [one for one in found if one.url.rpartition(":")[2] == name]
        found = [one for one in found if name in (one.model, one.directory, one.url, str(one.process_id))] or port
    if not found:
        raise UnreadableError(f"No onebox serves {name or 'on this machine'}; `onebox ps` lists what runs.")
    if len(found) > 1:
        raise UsageError(f"{len(found)} servers run; name one by process number or port (`onebox ps`), or give --all.")
    return found


def _refuse_served(one: _Checkpoint) -> None:
    for server in running_servers():
        if Path(server.directory).resolve() == one.directory.resolve():
            raise UnsupportedError(
                f"{one.directory} is being served by process {server.process_id}; "
                f"`onebox stop {server.process_id}` first."
            )


def _delete(one: _Checkpoint) -> None:
    try:
        # A snapshot of the hub's cache has links into a store beside it: the repository goes as a whole.
        shutil.rmtree(one.directory.parents[1] if one.kind == "hub cache" else one.directory)
    except OSError as error:
        raise WriteError(f"{error.filename} cannot be deleted: {error.strerror}.") from None


# What is here.


def _checkpoints(directory: Path) -> list[_Checkpoint]:
    folders = [directory, *(directory.glob("*") if directory.is_dir() else []), *directory.glob("sources/*")]
    places = [*(place for place in folders if (place / "config.json").is_file()), *known_places()]
    found = {place.resolve(): _describe(place.resolve()) for place in places}
    for snapshot in _hub_snapshots():
        name = snapshot.parents[1].name.removeprefix("models--").replace("--", "/")
        found[snapshot] = _Checkpoint(name, snapshot, _size(snapshot), "hub cache", snapshot.stat().st_mtime)
    return sorted(found.values(), key=lambda one: one.name)


def _hub_snapshots() -> list[Path]:
    """Of the family that onebox serves; the cache may hold many others."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from onebox.spec.errors import OneboxError
    from onebox.spec.model import read_config

    found = []
    for path in sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots/*")):
        try:
            read_config(path)
        except OneboxError:
            continue
        found.append(path)
    return found


def _describe(place: Path) -> _Checkpoint:
    from onebox.checkpoint.manifest import MANIFEST_NAME
    from onebox.checkpoint.origin import ORIGIN_NAME

    kind = "built" if (place / MANIFEST_NAME).is_file() else "fetched" if (place / ORIGIN_NAME).is_file() else "other"
    return _Checkpoint(place.name, place, _size(place), kind, place.stat().st_mtime)


def _size(place: Path) -> int:
    return sum(path.stat().st_size for path in place.iterdir() if path.is_file())


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def _print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    for row in (heads, *rows):
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
