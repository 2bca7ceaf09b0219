"""Runs a command on a host, over ssh or here, so that it ends when it is told to, or when its caller is gone.

The host's shell keeps the command in a session of its own and watches standard input. When that ends, because it was
closed, because this program died or because the connection broke, everything in the session is stopped: first asked
(SIGTERM), then forced. The same happens to what a dead command leaves behind: a vLLM whose first process was killed
leaves its workers running.
"""

import contextlib
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from onebox.scaleout.commands import NodeCommand
from onebox.spec.errors import UnreadableError

__all__ = ["GRACE_S", "Node", "ask_host", "is_here"]

GRACE_S = 20
"""Seconds between the two signals."""
_KEPT_LINES = 4000
_HERE = ("localhost", "127.0.0.1", "::1")
_SSH_FAILED = 255

# $1: the command; $2: GRACE_S. The first line of standard input is the API key, or empty: arguments can be read by all
# users of a host. Job control is off, so a background job would have no standard input: 3 is kept for it.
_GUARD = r"""
read -r key
[ -z "$key" ] || export VLLM_API_KEY="$key"
exec 3<&0
setsid sh -c "$1" </dev/null 2>&1 3<&- &
job=$!
{
  cat <&3
  kill -s TERM -- -$job
  left=$(($2 * 5))
  while [ $left -gt 0 ] && kill -s 0 -- -$job; do sleep 0.2; left=$((left - 1)); done
  kill -s KILL -- -$job
} >/dev/null 2>&1 &
guard=$!
exec 3<&-
wait $job
status=$?
kill -s KILL -- -$job 2>/dev/null
kill -s KILL $guard 2>/dev/null
exit $status
"""


def is_here(host: str) -> bool:
    return host in _HERE


def _words(host: str, ssh: Sequence[str], script: str, *arguments: str) -> list[str]:
    command = ["sh", "-c", script, "onebox", *arguments]
    return command if is_here(host) else [*ssh, host, shlex.join(command)]


def ask_host(host: str, ssh: Sequence[str], script: str, *arguments: str, timeout_s: float = 60) -> str:
    """What a script prints on a host. Raises `UnreadableError` with ssh's own words if it cannot be reached."""
    words = _words(host, ssh, script, *arguments)
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except OSError as error:
        raise UnreadableError(f"{words[0]} cannot be run: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise UnreadableError(f"{host} did not answer within {timeout_s:g} s.") from None
    if done.returncode == _SSH_FAILED and not is_here(host):
        raise UnreadableError(f"{host} cannot be reached by ssh: {_last_line(done.stderr)}")
    return done.stdout


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


class Node:
    """A running node: its last lines, its exit status, and a way to stop it."""

    def __init__(self, command: NodeCommand, ssh: Sequence[str], on_line: Callable[[NodeCommand, str], None]) -> None:
        self.command = command
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._on_line = on_line
        # A session of its own: Ctrl-C is for this process, which then stops all nodes together.
        self._process = subprocess.Popen(
            _words(command.host, ssh, _GUARD, command.line, str(GRACE_S)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{command.api_key or ''}\n")
                self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    @property
    def ssh_failed(self) -> bool:
        return self.status == _SSH_FAILED and not is_here(self.command.host)

    def wait(self, timeout_s: float) -> int | None:
        """Waits for its end, and for its last lines; None: it still runs."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        return status

    def ask_to_stop(self) -> None:
        """Closes its standard input, upon which the host stops all of it."""
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends the connection, or the shell here."""
        self._process.kill()

    def _read(self, output: IO[str] | None) -> None:
        for line in output or ():
            self.lines.append(line.rstrip("\n"))
            self._on_line(self.command, line.rstrip("\n"))
