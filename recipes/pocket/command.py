"""What the recipe's commands share: one-line errors, exit codes, progress lines."""

import sys
import time
from collections.abc import Callable

from onebox.spec.errors import OneboxError

__all__ = ["log_progress", "run_command"]

_STARTED = time.monotonic()
_INTERRUPTED = 130


def run_command(command: Callable[[], int]) -> int:
    """Runs `command` and returns its exit code. An expected error is printed as one line on stderr."""
    try:
        return command()
    except OneboxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return _INTERRUPTED


def log_progress(text: str) -> None:
    """Writes one line to stderr, with the seconds since the start. Results go to stdout."""
    sys.stderr.write(f"{time.monotonic() - _STARTED:7.0f} s  {text}\n")
    sys.stderr.flush()
