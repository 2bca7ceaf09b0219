"""The checker's process as the engine sees it: started, asked, replaced when it dies."""

import contextlib
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onebox.engine.grammar.value import Grammar, GrammarError
from onebox.engine.request import EngineStoppedError, QueueFullError
from onebox.spec.vocabulary import TokenTable

__all__ = ["CheckLateError", "GrammarChecker"]

_START_S = 60.0
"""The interpreter, the library, and the table of all tokens."""
_REPLY_S = 20.0
"""More than a check may take: only a stuck process is this late."""


class CheckLateError(Exception):
    """A first try was not enough."""


class GrammarChecker:
    """One checker process. One thread uses it, and lives as long: the kernel ends the process with that thread."""

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_ready = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        process = self._process
        return process.pid if process else None

    def start(self) -> None:
        """Starts the process, if none runs, and does not wait for it."""
        if self._is_closed:
            raise EngineStoppedError("The engine has stopped and accepts nothing more.")
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            module = "onebox.engine.grammar.check_process"
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())]
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self._connection.send((self._table, self._vocab_size))

    def check(self, grammar: Grammar, *, is_long: bool) -> GrammarError | None:
        """None where the grammar can be used, else why not.

        Raises CheckLateError where it takes longer than a first try may, QueueFullError where no process answers.
        """
        for _ in range(2):
            try:
                return self._ask(grammar, is_long=is_long)
            except (EOFError, OSError, subprocess.SubprocessError):
                self.stop()  # it was killed from outside: the next one is asked again
        raise QueueFullError("The grammar cannot be checked at the moment; try again.")

    def _ask(self, grammar: Grammar, *, is_long: bool) -> GrammarError | None:
        self.start()
        if not self._is_ready:
            self._receive(_START_S)
            self._is_ready = True
        if self._connection is None:
            raise EOFError
        self._connection.send((grammar, is_long))
        verdict: GrammarError | QueueFullError | CheckLateError | None = self._receive(_REPLY_S)
        if isinstance(verdict, QueueFullError | CheckLateError):
            raise verdict
        return verdict

    def _receive(self, timeout_s: float) -> Any:
        if self._connection is None or not self._connection.poll(timeout_s):
            raise EOFError
        return self._connection.recv()

    def close(self) -> None:
        """Called from another thread: ends the process, and with it a running check; no other is started."""
        self._is_closed = True
        process = self._process
        if process:
            process.kill()

    def stop(self) -> None:
        """Ends the process and frees what it held."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        self._is_ready = False
        if process:
            process.kill()
            process.wait()
        if connection:
            with contextlib.suppress(OSError):
                connection.close()
