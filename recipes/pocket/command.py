"""What the pocket model's commands share: errors are sentences, Ctrl-C is an exit code, progress has a clock."""

import sys
import time
from collections.abc import Callable

from onebox.spec.errors import OneboxError

__all__ = ["run_command", "say"]

_STARTED = time.monotonic()
_INTERRUPTED = 130


def run_command(command: Callable[[], int]) -> int:
    """The exit code of `command`; what it refuses is one sentence on stderr."""
    try:
        return command()
    except OneboxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return _INTERRUPTED


def say(text: str) -> None:
    """A line of progress on stderr, with the seconds since the start: stdout is for results."""
    sys.stderr.write(f"{time.monotonic() - _STARTED:7.0f} s  {text}\n")
    sys.stderr.flush()
