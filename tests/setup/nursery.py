"""Runs `onebox` commands in processes of their own that start at once: forks of one that has imported everything.

A command can be told to kill itself (SIGKILL) at its n-th change of the file system, whatever step that is in.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self

_CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link")

_PROGRAM = f"""
import json, os, signal, sys
import torch
import onebox.cli.main, onebox.setup.steps, onebox.checkpoint.build, onebox.engine.start, onebox.model.footprint
torch.set_num_threads(1)

def change(event, arguments):
    if event not in {_CHANGES!r}:
        return False
    if event == "open":
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR):
            return False
    else:
        path = arguments[0]
    return isinstance(path, (str, os.PathLike)) and str(os.path.abspath(path)).startswith(job["watched"])

def watch(event, arguments):
    if change(event, arguments):
        count[0] += 1
        if count[0] == job["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

for line in sys.stdin:
    job, count = json.loads(line), [0]
    child = os.fork()
    if child == 0:
        os.chdir(job["directory"])
        os.environ.update(job["environment"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job["files"] + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["onebox", *job["arguments"]]
        sys.addaudithook(watch)
        code = 0
        try:
            onebox.cli.main.main()
        except SystemExit as stop:
            code = stop.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
"""


class Ended(NamedTuple):
    """How a command ended: its exit code, negative for a signal, and what it printed."""

    code: int
    out: str
    err: str


class Nursery:
    """The process that all commands are forks of."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        command = [sys.executable, "-c", _PROGRAM]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, directory: Path, *arguments: str | Path, kill_at: int = 0, environment: dict[str, str] | None = None
    ) -> Ended:
        """Runs `onebox ARGUMENTS` in `directory`; kills it at its `kill_at`-th change of a file below it."""
        job: dict[str, Any] = {
            "directory": str(directory),
            "watched": str(directory),
            "arguments": [str(argument) for argument in arguments],
            "environment": environment or {},
            "kill_at": kill_at,
            "files": str(self._scratch / "std"),
        }
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return Ended(code, *((self._scratch / f"std{name}").read_text() for name in ("out", "err")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
