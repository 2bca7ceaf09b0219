"""The operating system's side of an engine's process: a fresh interpreter and the socket to it.

A caller that knows it will want an engine starts the process before anything else (`EarlyProcess`): it imports torch,
which takes seconds, while the caller imports a server and reads a tokenizer. Nothing slow is imported here.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from onebox.spec.log import LogStyle
from onebox.spec.output import log_style

__all__ = ["KILL_S", "EarlyProcess", "SpawnedProcess", "kill_group", "spawn"]

KILL_S = 20.0
"""A killed process has this long to go away. One inside a wedged driver may never do so."""


class SpawnedProcess(NamedTuple):
    """A process of `onebox.engine.remote.child`, and the caller's end of the socket between the two."""

    process: "subprocess.Popen[bytes]"
    socket: socket.socket


def spawn(device: str = "", style: LogStyle | None = None) -> SpawnedProcess:
    """With a device of `--device`, the process imports what an engine on it needs before it is told which engine.

    `style` is that of its log, by default this process's own. Raises OSError where the system has no descriptors,
    memory or processes left.
    """
    # A fresh interpreter, not a fork: a CUDA context does not survive one, nor do other threads' locks. A group of its
    # own, so that what it starts can be ended with it.
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        style = style or log_style()
        arguments = (str(theirs.fileno()), str(os.getpid()), style.format, style.level, device)
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "onebox.engine.remote.child", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,
        )
        undo.pop_all()
    return SpawnedProcess(process, ours)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process and those that it started, unless it was waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class EarlyProcess:
    """A process for an engine that is yet to be described; `EngineProcess` takes it, or it ends with the context."""

    def __init__(self, device: str, style: LogStyle | None = None) -> None:
        self.began = time.perf_counter()
        """When the command asked for it."""
        self._spawned: SpawnedProcess | None = None
        # Without it the engine gets its process later, and then says why there is none.
        with contextlib.suppress(OSError):
            self._spawned = spawn(device, style)

    def take(self) -> SpawnedProcess | None:
        """The process, once; it is the caller's then. None: there is none."""
        spawned, self._spawned = self._spawned, None
        return spawned

    def close(self) -> None:
        if spawned := self.take():
            spawned.socket.close()
            kill_group(spawned.process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                spawned.process.wait(KILL_S)

    def __enter__(self) -> "EarlyProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
