"""`onebox serve` as a process of its own, as its users start it."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

START_LIMIT_S = 300


@contextmanager
def started(*arguments, **pipes):
    """(process, URL) of a server on a free port; `process.ready_line` is what it said.

    One that is not ready in time is killed.
    """
    command = [sys.executable, "-m", "onebox.cli.main", "serve", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **pipes) as process:
        limit = threading.Timer(START_LIMIT_S, process.kill)
        limit.start()
        try:
            ready = next((line for line in process.stdout if line.startswith("Ready")), None)
            limit.cancel()
            assert ready, f"`{' '.join(command)}` ended before it was ready"
            process.ready_line = ready
            yield process, re.search(r"at (http\S+)/v1", ready).group(1)
        finally:
            limit.cancel()
            process.kill()


@contextmanager
def launched(*arguments):
    """The URL alone."""
    with started(*arguments) as (_, url):
        yield url
