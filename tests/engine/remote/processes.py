"""An engine's process without a model: how tests open and watch one, and the tokens that make it hang or die."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from onebox.engine.api import Engine, EngineConfig, HealthStatus
from onebox.engine.remote.messages import Planned, StartPhase
from onebox.engine.remote.supervise import RestartPolicy
from onebox.spec.errors import DoesNotFitError
from onebox.spec.vocabulary import TokenTable
from tests.engine.fake import FAILING, FakeRunner, wait_until

DYING = FAILING - 1
HANGING = FAILING - 2
SLOW = FAILING - 3
HALVING = FAILING - 4
FORKING = FAILING - 5
UNSENDABLE = FAILING - 6
CONFIG = EngineConfig(max_model_len=500, num_pages=30, num_checkpoints=4, max_num_seqs=4, max_num_waiting=2)
SOON = RestartPolicy(first_wait_s=0.01)


def wait_ok(engine):
    wait_until(lambda: engine.health().status is HealthStatus.OK)


def is_running(pid):
    """Whether the process computes; one that is dead and not yet collected does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


class DeadlyRunner(FakeRunner):
    """What a prompt that holds one of these tokens does to its step.

    DYING raises, HANGING never ends, SLOW makes this step and all later ones take a while, HALVING sends half a
    message and then hangs, FORKING leaves a process that holds the socket, writes its id to `left` and then hangs.
    UNSENDABLE gives an event that cannot be pickled.
    """

    step_s = 0.0

    def __init__(self, config, deliver, left):
        super().__init__(config)
        self._socket = deliver.__self__._connection.fileno()
        self._left = left

    def run(self, plan):
        prompts = [token_id for chunk in plan.chunks for token_id in chunk.token_ids]
        if SLOW in prompts:
            self.step_s = 0.01
        time.sleep(self.step_s)
        if HALVING in prompts:
            os.write(self._socket, (1000).to_bytes(4, "big") + b"half")
        if FORKING in prompts:
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[self._socket])
            self._left.write_text(str(process.pid))
        while {HANGING, HALVING, FORKING} & {*prompts}:
            time.sleep(1)
        if DYING in prompts:
            raise MemoryError("no more")
        return super().run(plan)

    def _chunk(self, chunk):
        result = super()._chunk(chunk)
        return result._replace(prompt_logprobs=(lambda: None,)) if UNSENDABLE in chunk.token_ids else result


@dataclass(frozen=True)
class FakeStarter:
    """Opens an engine over the deadly runner. `starts` is a file to which each start adds a line."""

    starts: Path
    takes_s: float = 0.0
    dies_from_start: int = 1000
    """The start from which on the process ends while it opens."""
    is_too_large: bool = False

    def plan(self, report):
        report(StartPhase("import", 0.0))
        if self.is_too_large:
            raise DoesNotFitError("The model takes 80 GiB, the box has 8.")
        return Planned(CONFIG, FakeRunner.vocab_size, None, "float32", b"")

    def start(self, planned, report, deliver):
        with self.starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(self.starts.read_text().splitlines()) >= self.dies_from_start:
            os._exit(3)
        time.sleep(self.takes_s)
        report(StartPhase("weights", self.takes_s))
        runner = DeadlyRunner(planned.config, deliver, self.starts.with_name("left"))
        return Engine(runner, planned.config, None, deliver)


@dataclass(frozen=True)
class GrammarStarter(FakeStarter):
    """With a token table, so that the engine takes grammars."""

    table: TokenTable | None = None

    def start(self, planned, report, deliver):
        report(StartPhase("weights", 0.0))
        return Engine(FakeRunner(planned.config), planned.config, self.table, deliver)


def stop_threads(pid: int) -> None:
    """SIGSTOP, and waits for it: the signal is sent before all threads of the process stand still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all("\nState:\tT" in (task / "status").read_text() for task in tasks.iterdir()))
