"""How the engine's process opens a checkpoint: plan, load, warm up. Torch is imported there, not by whoever asks."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from onebox.engine.api import Deliver, Engine, Failed, Request, SamplingParams
from onebox.engine.batch import Runner
from onebox.engine.config import PAGE_TOKENS, EngineConfig
from onebox.engine.options import EngineOptions, Vocabulary
from onebox.engine.wire import Planned, Tell, timed
from onebox.spec.errors import OneboxError

__all__ = ["CheckpointOpening"]


@dataclass(frozen=True)
class CheckpointOpening:
    """A checkpoint and what is asked of the engine over it."""

    directory: Path
    options: EngineOptions
    vocabulary: Vocabulary
    num_threads: int | None = None
    """Threads of computation on a CPU; None: as many as torch sees fit."""

    def plan(self, tell: Tell) -> Planned:
        with timed("import", tell):
            from onebox.engine.open import plan_engine
        with timed("memory plan", tell):
            plan = plan_engine(self.directory, self.options, self.vocabulary)
        dtype = str(plan.dtype).removeprefix("torch.")
        return Planned(plan.config, plan.spec.vocab_size, plan.memory, dtype, pickle.dumps(plan))

    def start(self, planned: Planned, tell: Tell, deliver: Deliver) -> Engine:
        import torch

        from onebox.engine.open import load_runner

        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        plan = pickle.loads(planned.plan)  # noqa: S301 - written by `plan` above, in a process like this one
        with timed("weights", tell):
            runner = load_runner(plan)
        with timed("warm-up", tell):
            _warm_up(runner, plan.config)
        return Engine(runner, plan.config, self.vocabulary.table, deliver)


def _warm_up(runner: Runner, config: EngineConfig) -> None:
    """Runs a prompt and a few steps, alone and with every slot taken, so that no client waits for kernels to compile.

    Over an engine of its own, which leaves neither counts nor cached prefixes behind.
    """
    num_prompt = min(PAGE_TOKENS + 1, config.max_model_len // 2)
    if not num_prompt:
        return
    prompt = tuple(place % runner.vocab_size for place in range(num_prompt))
    sampling = SamplingParams(max_tokens=min(4, config.max_model_len - num_prompt), ignore_eos=True)
    with Engine(runner, config) as engine:
        for count in sorted({1, config.max_num_seqs}):
            for handle in engine.submit_copies(Request("warm-up", prompt, sampling, cache_prompt=False), count):
                *_, last = handle
                if isinstance(last, Failed):
                    raise OneboxError(f"The model was loaded and cannot be run. {last.message}")
