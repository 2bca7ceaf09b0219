"""The `onebox` program: what must be done before the command line is imported."""

import contextlib
import os
import signal
import sys

__all__ = ["main", "prepare"]

_RESTARTED = "ONEBOX_RESTARTED"


def main() -> None:
    """Imports the command line and runs it."""
    prepare()
    from onebox.cli.main import main as run

    run()


def prepare() -> None:
    """Until the command line handles Ctrl-C, there is nothing to undo: it ends the process silently."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux" and sys.argv[1:2] == ["serve"]:
        _leave_pymalloc()


def _leave_pymalloc() -> None:
    """Starts the interpreter again, as the same process, with all objects in the C library's heap.

    Python's own allocator gives memory back by the megabyte, when nothing lives in one any more. A server whose clients
    send large bodies kept half as much again as it used, and more after each body that was larger than those before.
    """
    from onebox.spec.heap import bound_thread_caches, free_thread_caches

    if os.environ.pop(_RESTARTED, None):
        # Not for the processes that this one starts.
        del os.environ["PYTHONMALLOC"]
        free_thread_caches(os.environ)
    elif "PYTHONMALLOC" not in os.environ:
        environment = {**os.environ, "PYTHONMALLOC": "malloc", _RESTARTED: "1"}
        bound_thread_caches(environment)
        with contextlib.suppress(OSError):
            os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - the command that is running
