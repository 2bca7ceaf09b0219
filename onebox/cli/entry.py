"""The `onebox` program: imports the command line without a traceback for who presses Ctrl-C meanwhile."""

import signal

__all__ = ["main"]


def main() -> None:
    """Until the command line handles Ctrl-C, there is nothing to undo: it ends the process silently."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from onebox.cli.main import main as run

    run()
