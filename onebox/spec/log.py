"""How log lines are written: as text or as one JSON object a line, with their time and level."""

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from onebox.spec.errors import UsageError

__all__ = ["FORMATS", "LEVELS", "JsonLines", "LogStyle", "TextLines", "json_line"]

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LogStyle:
    """What is written, and how."""

    format: str = "text"
    level: str = "info"
    """The least that is written."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"--log-format is {self.format!r}; it takes {' or '.join(FORMATS)}.")
        if self.level not in LEVELS:
            raise UsageError(f"--log-level is {self.level!r}; it takes one of {', '.join(LEVELS)}.")

    @property
    def number(self) -> int:
        """The level as `logging` counts it."""
        return logging.getLevelNamesMapping()[self.level.upper()]

    def writes(self, level: str) -> bool:
        """Whether something of this level is written."""
        return LEVELS.index(level) >= LEVELS.index(self.level)

    def line(self, level: str, message: str) -> str:
        """What is said to the operator apart from the log: in text as it is."""
        return json_line(level, message) if self.format == "json" else message

    @property
    def formatter(self) -> logging.Formatter:
        return JsonLines() if self.format == "json" else TextLines()


class TextLines(logging.Formatter):
    """`2026-05-01 12:00:00.123 INFO onebox.server: message`; the times are local."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, what `extra={"fields": ...}` holds, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"logger": record.name, **getattr(record, "fields", {})}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_line(record.levelname.lower(), record.getMessage(), record.created, **fields)


def json_line(level: str, message: str, at: float | None = None, **fields: Any) -> str:
    """`at` in seconds since 1970; None is now."""
    at = time.time() if at is None else at
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"
    return json.dumps({"time": stamp, "level": level, "message": message, **fields}, ensure_ascii=False, default=str)
