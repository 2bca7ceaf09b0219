"""The command line of each node: what `onebox scaleout launch` prints with --dry-run, and runs without.

With several hosts every one runs `vllm serve` with the same engine flags, its own node rank and the head's address; all
but the head run headless. With one host vLLM starts the ranks itself.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onebox.scaleout.environment import NodeVariable, rank_settings
from onebox.scaleout.flags import ServeFlags
from onebox.scaleout.hosts import Fabric
from onebox.spec.errors import UsageError

__all__ = ["LaunchPlan", "NodeCommand", "node_commands"]


@dataclass(frozen=True)
class LaunchPlan:
    """What is launched where."""

    model: str
    tp: int
    pp: int = 1
    program: tuple[str, ...] = ("vllm",)
    master_port: int = 25000
    settings: tuple[NodeVariable, ...] = ()
    """Given by the user, for every node."""


@dataclass(frozen=True)
class NodeCommand:
    """One node's program, flags and environment."""

    host: str
    node_rank: int
    words: tuple[str, ...]
    settings: tuple[NodeVariable, ...]
    api_key: str | None = None
    """Of the head; handed over on standard input, so that no list of processes shows it."""

    @property
    def line(self) -> str:
        """For a shell."""
        variables = [f"{setting.name}={setting.value}" for setting in self.settings]
        return shlex.join(["env", *variables, *self.words] if variables else self.words)

    def shown(self) -> str:
        """The same for reading: a variable a line with its reason."""
        lines = [f"# node {self.node_rank} on {self.host}"]
        lines += [f"export {one.name}={shlex.quote(one.value)}  # {one.reason}" for one in self.settings]
        if self.api_key:
            lines.append("export VLLM_API_KEY=...  # handed over on standard input, in no list of processes")
        return "\n".join([*lines, _wrapped(self.words)])


def node_commands(plan: LaunchPlan, fabrics: Sequence[Fabric], flags: ServeFlags, host: str) -> list[NodeCommand]:
    """The head's command first. `host` is the address that the HTTP server listens on."""
    count = len(fabrics)
    if plan.tp * plan.pp % count:
        raise UsageError(
            f"--tp {plan.tp} times --pp {plan.pp} ranks cannot be divided evenly among {count} hosts; vLLM needs that."
        )
    nodes = [_node(plan, fabric, flags, fabrics, rank) for rank, fabric in enumerate(fabrics)]
    head = nodes[0]
    http = ("--host", host, "--port", str(flags.port), *flags.head)
    nodes[0] = replace(head, words=(*head.words, *http), api_key=flags.api_key)
    return nodes


def _node(plan: LaunchPlan, fabric: Fabric, flags: ServeFlags, fabrics: Sequence[Fabric], rank: int) -> NodeCommand:
    words = [*plan.program, "serve", plan.model, "--tensor-parallel-size", str(plan.tp)]
    if plan.pp > 1:
        words += ["--pipeline-parallel-size", str(plan.pp)]
    if plan.tp * plan.pp > 1:
        words += ["--distributed-executor-backend", "mp"]
    words += flags.shared
    if len(fabrics) > 1:
        words += ["--nnodes", str(len(fabrics)), "--node-rank", str(rank)]
        words += ["--master-addr", fabrics[0].address, "--master-port", str(plan.master_port)]
        words += ["--headless"] if rank else []
    settings = (*rank_settings(fabric, num_hosts=len(fabrics)), *plan.settings)
    return NodeCommand(fabric.host.name, rank, tuple(words), settings)


def _wrapped(words: Sequence[str]) -> str:
    """A flag with its value on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines)
