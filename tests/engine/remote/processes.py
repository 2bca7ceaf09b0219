"""An engine's process without a model: how tests open one, and the tokens that make it hang or die."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from onebox.engine.api import Engine, EngineConfig
from onebox.engine.remote.messages import Planned, StartPhase
from onebox.spec.errors import DoesNotFitError
from tests.engine.fake import FAILING, FakeRunner

DYING = FAILING - 1
HANGING = FAILING - 2
SLOW = FAILING - 3
CONFIG = EngineConfig(max_model_len=500, num_pages=30, num_checkpoints=4, max_num_seqs=4, max_num_waiting=2)


class DeadlyRunner(FakeRunner):
    """A prompt that holds DYING raises out of the step, one with HANGING never ends, after one with SLOW steps take."""

    step_s = 0.0

    def run(self, plan):
        prompts = [token_id for chunk in plan.chunks for token_id in chunk.token_ids]
        if SLOW in prompts:
            self.step_s = 0.01
        time.sleep(self.step_s)
        while HANGING in prompts:
            time.sleep(1)
        if DYING in prompts:
            raise MemoryError("no more")
        return super().run(plan)


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
        return Engine(DeadlyRunner(planned.config), planned.config, None, deliver)
