"""A result file, read-only: figures are read by key and shown with that key, so that each can be traced.

Accepts the two formats by name and refuses any other file.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from onebox.bench.record import FORMAT as BENCH_FORMAT
from onebox.bench.record import read_run
from onebox.eval.run import FORMAT as EVAL_FORMAT
from onebox.spec.errors import UnreadableError

__all__ = ["BENCH_FORMAT", "EVAL_FORMAT", "ResultFile", "Value", "load", "pointer"]


class Value(NamedTuple):
    """A figure as shown, its raw number, and its origin: a file and a JSON pointer (RFC 6901) in it."""

    text: str
    raw: Any
    file: str
    key: str


class ResultFile(NamedTuple):
    """One result file. `name` and `path` are those shown in the report."""

    name: str
    path: str
    sha256: str
    body: dict[str, Any]

    @property
    def is_eval(self) -> bool:
        return bool(self.body["format"] == EVAL_FORMAT)

    def at(self, key: str) -> Any:
        """The value at a JSON pointer; None if absent."""
        place: Any = self.body
        for part in key.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                place = place[int(name)] if isinstance(place, list) else place[name]
            except (LookupError, ValueError, TypeError):
                return None
        return place

    def value(self, key: str, form: str = "", unit: str = "") -> Value | str:
        """The figure at a key, in a format such as ".1f", ",d", ".1%" or "ms"; a dash if absent."""
        found = self.at(key)
        if found is None or (isinstance(found, float) and math.isnan(found)):
            return "-"
        return Value(_shown(found, form) + unit, found, self.path, key)


def _shown(found: Any, form: str) -> str:
    if form == "s":
        return _seconds(float(found))
    return format(found, form) if form else str(found)


def _seconds(value: float) -> str:
    """Three significant digits, in milliseconds below one second."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def pointer(*parts: str | int) -> str:
    """A JSON pointer with these parts."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def load(path: Path, shown: str = "") -> ResultFile:
    """Reads a result of `onebox bench` or `onebox eval`; any other file is refused.

    `shown` is the path to show in the report, if different: relative to the report's directory.
    """
    try:
        data = path.read_bytes()
        body = json.loads(data)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise UnreadableError(f"{path} is not JSON ({error}); give a file written by --output.") from None
    found = body.get("format") if isinstance(body, dict) else None
    if found == BENCH_FORMAT:
        read_run(path)  # refuses a damaged file, naming the location
    elif found != EVAL_FORMAT:
        raise UnreadableError(
            f"{path} is not a result of this onebox: its format is {found!r}, not {BENCH_FORMAT!r} or {EVAL_FORMAT!r}."
        )
    elif missing := [key for key in ("sides", "tallies", "texts", "failures", "comparison") if key not in body]:
        raise UnreadableError(f"{path} is damaged: {missing[0]!r} is missing.")
    return ResultFile(path.stem, shown or str(path), hashlib.sha256(data).hexdigest(), body)
