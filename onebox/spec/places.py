"""Checkpoints that onebox fetched, built or served on this machine, so that `onebox list` finds them from anywhere."""

import contextlib
import json
import os
from pathlib import Path

__all__ = ["forget_place", "known_places", "remember_place"]


def remember_place(directory: Path) -> None:
    """Notes a directory; where that cannot be written, nothing is lost but the line of `onebox list`."""
    with contextlib.suppress(OSError, RuntimeError):
        _write([*(place for place in known_places() if place != directory.resolve()), directory.resolve()])


def forget_place(directory: Path) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        _write([place for place in known_places() if place != directory.resolve()])


def known_places() -> list[Path]:
    """Those that are still there."""
    try:
        places = [Path(text) for text in json.loads(_path().read_text())]
        return [place for place in places if (place / "config.json").is_file()]
    except (OSError, ValueError, TypeError, RuntimeError):
        return []


def _path() -> Path:
    """Not in the cache directory: who empties that still has the checkpoints."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = given if given.is_absolute() else Path.home() / ".local" / "state"
    return home / "onebox" / "places.json"


def _write(places: list[Path]) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps([str(place) for place in places]))
    part.replace(path)
