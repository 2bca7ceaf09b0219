"""Starting, hearing and ending the engine's process, when to start another, and adding up what they all did."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onebox.engine.prefix import PrefixStats
from onebox.engine.stats import EngineStats, FrozenTotals
from onebox.engine.wire import Open

__all__ = ["ChildProcess", "RestartPolicy", "add_past"]


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine counts as hung, how long to wait before the next one, and when to give up. Times in seconds."""

    hang_s: float = 300.0
    """Without a finished step while requests are open. A step computes at most --max-num-batched-tokens of prompt, so
    only a stuck one takes so long; loading is not limited."""
    first_wait_s: float = 1.0
    """Doubled with every quick death in a row."""
    quick_s: float = 60.0
    """A process that served for less died quickly."""
    max_quick_deaths: int = 5

    def wait_s(self, quick_deaths: int) -> float:
        """Before the next start, after so many quick deaths in a row."""
        return float(self.first_wait_s * 2 ** max(0, quick_deaths - 1))


class ChildProcess:
    """One engine process and the socket to it. One thread hears; any thread may say."""

    def __init__(self, first: Open) -> None:
        ours, theirs = socket.socketpair()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        with theirs:
            # A fresh interpreter, not a fork: a CUDA context does not survive one, nor do other threads' locks.
            command = [sys.executable, "-P", "-m", "onebox.engine.child", str(theirs.fileno()), str(os.getpid())]
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="onebox-engine-sender", daemon=True)
        self._sender.start()
        self.say(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: object) -> None:
        """Never waits: a process that does not listen must not hold up its callers."""
        self._outbox.put(message)

    def hear(self, timeout_s: float) -> Any:
        """The next message, None when none comes in time; EOFError or OSError when none will come any more."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Makes sure that the process is gone, and says how it went."""
        try:
            # One whose socket is closed is about to end by itself, and its own status says more.
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._outbox.put(None)
        self._sender.join()
        self._connection.close()
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def _send(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return


def add_past(stats: EngineStats, past: EngineStats | None) -> EngineStats:
    """The stats with the totals of earlier processes added, so that no count ever falls."""
    if past is None:
        return stats
    now, then = stats.totals, past.totals
    totals = FrozenTotals(
        num_steps=now.num_steps + then.num_steps,
        finished=dict(Counter(now.finished) + Counter(then.finished)),
        num_failed=now.num_failed + then.num_failed,
        num_preempted=now.num_preempted + then.num_preempted,
        prompt_tokens=now.prompt_tokens + then.prompt_tokens,
        completion_tokens=now.completion_tokens + then.completion_tokens,
        drafts=now.drafts + then.drafts,
    )
    return replace(stats, totals=totals, prefix=_add_prefix(stats.prefix, past.prefix))


def _add_prefix(now: PrefixStats, then: PrefixStats) -> PrefixStats:
    return replace(
        now,
        queried_tokens=now.queried_tokens + then.queried_tokens,
        hit_tokens=now.hit_tokens + then.hit_tokens,
        saved=now.saved + then.saved,
        evicted=now.evicted + then.evicted,
    )
