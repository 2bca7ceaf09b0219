"""Runs `onebox` commands in processes of their own that start at once: forks of one that has imported everything.

`onebox up` can be told to send itself a signal at the n-th change of the file system in one of its steps.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self

_PROGRAM = """
import json, os, resource, signal, sys
import torch
import huggingface_hub, huggingface_hub.hf_api, httpx
import onebox.cli.main, onebox.setup.steps, onebox.checkpoint.build, onebox.engine.start, onebox.model.footprint
import onebox.cli.serve_arguments, rich.console, rich.progress
torch.set_num_threads(1)
# Imports what parsing a command line imports.
onebox.cli.serve_arguments.ServeArguments.resolve(onebox.setup.recipe_file.find_recipe("qwen3.5-35b-a3b"), [])
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link")

def is_change(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if not flags & (os.O_WRONLY | os.O_RDWR):
            return False
    elif event in CHANGES:
        path = arguments[0]
    else:
        return False
    return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(job["directory"])

def is_in_step():
    try:
        with open(job["directory"] + "/models/.onebox_up.lock") as file:
            return file.read() == f"process {os.getpid()}, step {job['step']}\\n"
    except FileNotFoundError:
        return False

def watch(event, arguments):
    if job["step"] and is_change(event, arguments) and is_in_step():
        count[0] += 1
        if count[0] == job["stop_at"]:
            os.kill(os.getpid(), job["signal"])

def run():
    os.chdir(job["directory"])
    os.environ.update(job["environment"])
    huggingface_hub.constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    huggingface_hub.constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job["files"] + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if job["max_file_bytes"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"],) * 2)
    sys.argv = ["onebox", *job["arguments"]]
    sys.addaudithook(watch)
    code = 1
    try:
        onebox.cli.main.main()
    except SystemExit as stop:
        code = stop.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    job, count = json.loads(line), [0]
    child = os.fork()
    if child == 0:
        run()
    _, status = os.waitpid(child, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
"""


class Ended(NamedTuple):
    """How a command ended: its exit code, negative for a signal, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def steps(self) -> dict[str, str]:
        """The last line of each step."""
        lines = (line.split(maxsplit=1) for line in self.out.splitlines() if line[:1].isalpha())
        return {words[0]: words[1] for words in lines if len(words) == 2}

    @property
    def redone(self) -> set[str]:
        """The steps that were not done already."""
        return {step for step, text in self.steps.items() if step in STEPS and not text.startswith("done:")}


STEPS = ("check", "fetch", "build", "verify", "warm")


class Nursery:
    """The process that all commands are forks of."""

    def __init__(self, scratch: Path, environment: dict[str, str]) -> None:
        self._scratch, self._environment = scratch, environment
        command, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment})

    def run(
        self,
        directory: Path,
        *arguments: str | Path,
        step: str = "",
        stop_at: int = 1,
        signal: int = 9,
        max_file_bytes: int = 0,
        environment: dict[str, str] | None = None,
    ) -> Ended:
        """Runs `onebox ARGUMENTS` in `directory`; sends it `signal` at the `stop_at`-th change of a file in `step`.

        No file can grow beyond `max_file_bytes`, as on a full disk.
        """
        job: dict[str, Any] = {
            "directory": str(directory),
            "arguments": [str(argument) for argument in arguments],
            "environment": {**self._environment, **(environment or {})},
            "step": step,
            "stop_at": stop_at,
            "signal": signal,
            "max_file_bytes": max_file_bytes,
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
