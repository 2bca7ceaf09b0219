"""The evaluation target: the URL of a running server, or a directory, for which a server is started and stopped."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onebox.spec.errors import OneboxError, UsageError

__all__ = ["opened", "refuse_wrong_target"]

_POCKET = "pocket"
"""The model that ships with onebox: `onebox serve` without a directory."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
"""owner/name or owner/name@revision; `onebox serve` says whether it has it."""
_STOP_S = 30.0
_LAST_LINES = 5


def refuse_wrong_target(target: str, serve_arguments: str) -> None:
    """Early check: a target is a URL, a saved result, or what `onebox serve` takes, with arguments for it."""
    is_result = target.endswith(".json") and Path(target).is_file()
    if _is_address(target) or is_result:
        if serve_arguments:
            what = "a saved result" if is_result else "a running server"
            raise UsageError(f"{target} is {what}; arguments for `onebox serve` need a directory.")
    elif target != _POCKET and not Path(target).is_dir() and not _HUB_ID.fullmatch(target):
        raise UsageError(
            f"{target} is neither a URL (http://...), nor a checkpoint directory, nor {_POCKET!r}, nor the result of "
            "an earlier run (.json); give one."
        )
    try:
        shlex.split(serve_arguments)
    except ValueError as error:
        raise UsageError(f"{serve_arguments!r} cannot be split into arguments ({error}).") from None


def _is_address(target: str) -> bool:
    if target == _POCKET or Path(target).is_dir():
        return False
    return "://" in target or bool(re.fullmatch(r"[\w.-]+:\d+(/.*)?", target))


@contextmanager
def opened(target: str, serve_arguments: str = "") -> Iterator[str]:
    """The URL of a server for the target; a server started here is always stopped on exit."""
    if _is_address(target):
        yield target
        return
    model = [] if target == _POCKET else [target]
    command = [sys.executable, "-m", "onebox.cli.main", "serve", *model, *shlex.split(serve_arguments), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # A separate session: Ctrl-C reaches only this process, which stops the server after its last request.
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            url = _url_when_ready(target, process.stdout or ())
            # A full pipe would stop the server at its next line of log.
            threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
            yield url
        finally:
            _stop(process)


def _url_when_ready(target: str, lines: Iterable[str]) -> str:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    for line in lines:
        found = re.match(r"Ready .* at (http\S+)/v1", line)
        if found:
            return found.group(1)
        last.append(line.strip())
    said = " / ".join(filter(None, last)) or "nothing"
    raise OneboxError(f"`onebox serve` of {target} ended before it was ready. Its output: {said}")


def _stop(process: subprocess.Popen[str]) -> None:
    """Stops the server; after a while by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also when Ctrl-C is pressed again meanwhile.
            process.kill()
