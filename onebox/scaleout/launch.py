"""Starts vLLM on all hosts, waits until it answers, and stops all nodes together: asked to, or when one of them ends.

vLLM's head goes on answering /health with 200 when another node is gone, and hangs at its next step. So the nodes are
watched here, each through the process that started it.
"""

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

from onebox.scaleout.commands import NodeCommand
from onebox.scaleout.hosts import PROBE, HostReport, read_probe
from onebox.scaleout.nodes import GRACE_S, Node, ask_host
from onebox.spec.errors import MismatchError, OneboxError

__all__ = ["SSH", "LaunchedNodes", "NodeEndedError", "failure_cause", "launched_nodes", "probe_hosts"]

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
"""Never asks for a password; a host that is gone is noticed after 15 seconds."""
_LOOK_S = 0.2
_NOT_RUN = (126, 127)
"""A shell's status for a program that it cannot run, or does not find."""
_STOP_S = GRACE_S + 15
_ERROR = re.compile(r"(?:^|[\s)])((?:\w+\.)*\w*(?:Error|Exception)): (\S.*)$")
_DIED = re.compile(r"Worker proc (\S+) died unexpectedly(?: \(exit code: (-?\d+)\))?")
_FOLLOW_UPS = ("See root cause above", "See stack trace above", "Engine core initialization failed")
_KNOWN = {
    "illegal memory access": "known with MTP drafts and several conversations on this family: fewer or no drafts",
    "Address already in use": "another server has the port: choose others with --port and --master-port",
    "CUDA out of memory": "give --gpu-memory-utilization 0.80 or a smaller --max-model-len",
    "No space left on device": "shared memory may be too small: 10 GB for /dev/shm",
    "NCCL error": "NCCL_DEBUG=INFO in --env shows which device and address it tried",
}


class NodeEndedError(OneboxError):
    """A node ended, or did not come up; the message says which and why, in one sentence."""


def probe_hosts(hosts: Sequence[str], ssh: Sequence[str], model: str, sysfs: str = "/sys") -> list[HostReport]:
    """Asks all hosts at once. Refuses hosts without the model, or with different ones."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: ask_host(host, ssh, PROBE, model, sysfs), hosts))
    reports = [read_probe(host, text) for host, text in zip(hosts, answers, strict=True)]
    missing = [report.name for report in reports if report.model_digest is None]
    if missing:
        raise MismatchError(
            f"{', '.join(missing)}: {model} is not there; every host reads the checkpoint from the same path, copy it "
            "or share it."
        )
    if len({report.model_digest for report in reports}) > 1:
        names = ", ".join(report.name for report in reports)
        raise MismatchError(f"{model}/config.json differs between {names}: copy one checkpoint to all of them.")
    return reports


class LaunchedNodes:
    """All nodes of one launch."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes

    def wait_until_healthy(self, url: str, timeout_s: float, on_wait: Callable[[float], None]) -> float:
        """Seconds until /health answered. Raises `NodeEndedError` if a node ends before, or time is up."""
        began = time.monotonic()
        while not _is_healthy(url):
            self.refuse_ended("before it served")
            waited = time.monotonic() - began
            if waited > timeout_s:
                causes = [cause for node in self.nodes if (cause := failure_cause(node.lines))]
                why = causes[0] if causes else "no node printed an error"
                raise NodeEndedError(f"{url}/health did not answer within {timeout_s:g} s; {why}.")
            on_wait(waited)
            time.sleep(_LOOK_S)
        return time.monotonic() - began

    def watch(self) -> None:
        """Returns never: raises `NodeEndedError` when a node ends, or what a signal raises."""
        while True:
            self.refuse_ended("while it served")
            time.sleep(_LOOK_S)

    def refuse_ended(self, when: str) -> None:
        for node in self.nodes:
            if node.status is not None:
                node.wait(5)
                raise NodeEndedError(_ended_sentence(node, when))

    def stop(self) -> list[str]:
        """Stops all nodes together; the hosts of those that had to be left behind."""
        for node in self.nodes:
            node.ask_to_stop()
        end = time.monotonic() + _STOP_S
        left = [node for node in self.nodes if node.wait(max(0.0, end - time.monotonic())) is None]
        for node in left:
            node.kill()
            node.wait(5)
        return [node.command.host for node in left]


@contextmanager
def launched_nodes(
    commands: Sequence[NodeCommand], ssh: Sequence[str], on_line: Callable[[NodeCommand, str], None]
) -> Iterator[LaunchedNodes]:
    """Starts all nodes, the head first; on exit, however it comes, all of them are stopped."""
    launched = LaunchedNodes([])
    with _terminated_as_interrupted():
        try:
            for command in commands:
                launched.nodes = [*launched.nodes, Node(command, ssh, on_line)]
            yield launched
        finally:
            launched.stop()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM stops the nodes as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        # Not through a proxy of the environment: the head is near.
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    return False


def _ended_sentence(node: Node, when: str) -> str:
    command, status = node.command, node.status or 0
    who = f"Node {command.node_rank} on {command.host}"
    cause = failure_cause(node.lines)
    if node.ssh_failed:
        last = next((line for line in reversed(node.lines) if line.strip()), "nothing was printed")
        return f"{who}: the connection by ssh ended {when} ({last.strip()})."
    if status in _NOT_RUN and not cause:
        return f"{who}: {command.words[0]} cannot be run there; install vLLM, or name its program with --program."
    how = f"was killed by {_signal_name(status - 128)}" if status > 128 else f"ended with status {status}"
    return f"{who} {how} {when}{f': {cause}' if cause else ''}."


def _exit_name(code: int) -> str:
    """Of a status as Python gives it, a signal's negative."""
    return _signal_name(-code) if code < 0 else f"status {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failure_cause(lines: Sequence[str]) -> str | None:
    """The error at the root of what a node printed: the first that does not point to another one above it."""
    for line in lines:
        died = _DIED.search(line)
        if died:
            # vLLM may not know the code yet.
            how = f" ({_exit_name(int(died.group(2)))})" if died.group(2) else ""
            return f"its worker {died.group(1)} died{how}"
        found = None if " WARNING " in line else _ERROR.search(line)
        if found and not any(text in line for text in _FOLLOW_UPS):
            message = f"{found.group(1).rpartition('.')[2]}: {found.group(2).strip().rstrip('.')}"
            advice = next((advice for text, advice in _KNOWN.items() if text in line), None)
            return f"{message} ({advice})" if advice else message
    return None
