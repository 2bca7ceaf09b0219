"""Stage 2, `python -m recipes.pocket.train --minutes 9 --out DIR`: trains the pocket model on one GPU in a given time.

The time decides the schedule, so a run ends in time on any machine: most of it reads sequences of 1,024 tokens, the
last part longer ones, and the learning rate falls to 0 at the end. The checkpoint in DIR is written every two minutes,
at the end, and when the run is interrupted. `--resume` continues from it, with new optimizer moments. `--toy` trains a
tiny model for seconds on a CPU, to test the code.

On a GPU the delta rule runs on fla's kernels: install fla-core, or `pip download --no-deps fla-core einops -d
.pocket/wheels` where nothing can be installed. Without them training is many times slower.
"""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.model import ModelSpec, spec_from_config
from recipes.pocket.command import run_command
from recipes.pocket.config import TOY, pocket_config
from recipes.pocket.data.tokens import check_token_files
from recipes.pocket.synthetic.workloads import SHARES
from recipes.pocket.training.checkpoint import read_progress, read_weights, save_run
from recipes.pocket.training.delta_rule import choose_delta_rule, plain_delta_rule
from recipes.pocket.training.feed import (
    ExamplePool,
    Feed,
    MixedFeed,
    TextRows,
    ToyFeed,
    end_token,
    example_task,
    num_workers,
)
from recipes.pocket.training.network import LayerFunctions, TrainingNetwork, Weights, draw_weights
from recipes.pocket.training.schedule import RunClock
from recipes.pocket.training.trainer import BatchShape, Save, Trainer, log_step, run_and_save, warm_up

__all__ = ["main", "train_pocket", "train_toy"]

_TOY_SHAPE = BatchShape(tokens=512, lengths=(64, 128))


def train_pocket(data: Path, model: Path, out: Path, start: Path | None, clock: RunClock) -> None:
    """The real run, with the tokenizer in `model`. Forks the workers before the GPU is used."""
    check_token_files(data, model)
    shape, config = BatchShape(), pocket_config(first_special_token=end_token(model))
    pool = ExamplePool(shape.pool_rows)
    feed = MixedFeed(TextRows(data), pool, tuple(SHARES))
    pool.start(num_workers(), example_task(data, {name: feed.kinds.index(name) for name in SHARES}, model))
    try:
        spec = spec_from_config(config)
        network = _gpu_network(spec, data / "wheels", clock)
        trainer = Trainer(network, _initial_weights(spec, start), feed, shape, _device())
        while not pool.is_ready():
            time.sleep(0.1)
        trainer = warm_up(trainer, clock)
        log_step(clock, f"ready: {trainer.shape.tokens} tokens a step, rows made {pool.num_made()}")
        run_and_save(trainer, clock, _saver(out, config, clock), pool)
    finally:
        pool.stop()


def train_toy(out: Path, start: Path | None, clock: RunClock) -> None:
    """A tiny model on the CPU, without data."""
    spec = spec_from_config(TOY)
    feed: Feed = ToyFeed(spec.vocab_size)
    network = TrainingNetwork(spec, plain_delta_rule)
    trainer = Trainer(network, _initial_weights(spec, start), feed, _TOY_SHAPE, torch.device("cpu"))
    run_and_save(warm_up(trainer, clock), clock, _saver(out, TOY, clock))


def _device() -> torch.device:
    """The GPU, or if there is none, and slowly, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _gpu_network(spec: ModelSpec, wheels: Path, clock: RunClock) -> TrainingNetwork:
    device = _device()
    torch.set_float32_matmul_precision("high")
    rule, reason = choose_delta_rule(spec, device, wheels)
    log_step(clock, f"{device}, torch {torch.__version__}; {reason}")
    functions = LayerFunctions.compiled() if device.type == "cuda" else LayerFunctions()
    return TrainingNetwork(spec, rule, functions)


def _initial_weights(spec: ModelSpec, start: Path | None) -> Weights:
    return read_weights(start)[1] if start else draw_weights(spec)


def _saver(out: Path, config: Mapping[str, Any], clock: RunClock) -> Save:
    return partial(save_run, out, config, clock)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.train", description=__doc__)
    parser.add_argument("--minutes", type=float, default=None, help="time of the whole run; 9, or 0.2 with --toy")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="output of `prepare`; default .pocket")
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="where `prepare` wrote the tokenizer")
    parser.add_argument("--start", type=Path, default=None, help="initial weights of a new run: a checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted run in --out")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    given = parser.parse_args(arguments)
    if given.minutes is not None and given.minutes <= 0:
        parser.error("--minutes must be above 0")

    def run() -> int:
        done = read_progress(given.out) if given.resume else 0.0
        if done < 1:
            clock = RunClock(given.minutes or (0.2 if given.toy else 9.0), done)
            start = given.out if done else given.start
            given.out.mkdir(parents=True, exist_ok=True)
            if given.toy:
                train_toy(given.out, start, clock)
            else:
                train_pocket(given.data, given.model, given.out, start, clock)
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
