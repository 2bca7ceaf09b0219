"""`onebox serve` as a process of its own, as its users start it."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def launched(*arguments):
    """Gives the server's URL, on a free port."""
    command = [sys.executable, "-m", "onebox.cli.main", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = next((line for line in process.stdout if line.startswith("Ready")), None)
            assert ready, f"`{' '.join(command)}` ended before it was ready"
            yield re.search(r"at (http\S+)/v1", ready).group(1)
        finally:
            process.kill()
