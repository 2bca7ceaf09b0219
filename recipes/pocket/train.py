"""Trains the pocket model on one GPU, within a given time: `python -m recipes.pocket.train --minutes 9 --out DIR`.

The clock decides the schedule, so a run ends in time on any machine: most of it reads sequences of 1,024 tokens, the
last part longer ones, and the learning rate falls to nothing at the end. The checkpoint in DIR is written again every
two minutes and at the end, or when the run is stopped; `--resume` goes on from there, with the optimizer's moments
gathered anew. `--toy` trains a tiny model for seconds on a CPU, to see that everything works.

On a GPU the delta rule runs on fla's kernels: install fla-core, or `pip download --no-deps fla-core einops -d
.pocket/wheels` where nothing can be installed. Without them training is many times slower.
"""

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import DoesNotFitError
from onebox.spec.model import ModelSpec, spec_from_config
from recipes.pocket.command import run_command
from recipes.pocket.config import TOY, pocket_config
from recipes.pocket.export import read_weights
from recipes.pocket.training.clock import Clock, progress_of, save_run
from recipes.pocket.training.delta_rule import choose_delta_rule
from recipes.pocket.training.feed import ANSWER_WEIGHT, ExamplePool, Feed, MixedFeed, TextRows, ToyFeed, num_workers
from recipes.pocket.training.network import Network, Pieces, Places, Weights, draw_weights
from recipes.pocket.training.optimizer import Optimizer

Save = Callable[[Weights], None]

__all__ = ["Plan", "Trainer", "learning_rate", "main"]

LEARNING_RATE = 4e-3
WARM_UP = 0.02
DECAY = 0.45
"""Shares of the run in which the learning rate rises and falls."""
MTP_WEIGHTS = (0.3, 0.15)
"""What a first and a second draft's loss count beside the model's own."""
BALANCE_WEIGHT = 0.01
LONG_PART = 0.35
"""The last share of the run, in long sequences: retrieval far back is learned there."""
LOG_SECONDS = 10
SAVE_SECONDS = 120


@dataclass(frozen=True)
class Plan:
    """How much a step reads and how it is cut: `tokens` are num_rows * length, whichever of the two lengths."""

    tokens: int = 98_304
    lengths: tuple[int, int] = (1024, 8192)

    @property
    def pool_rows(self) -> dict[int, int]:
        """Rows of examples kept of each length: as many tokens of either."""
        return {length: max(1, 2**24 // length) for length in self.lengths}


def learning_rate(progress: float) -> float:
    """At a share `progress` of the run: up, level, and down to nothing."""
    return LEARNING_RATE * max(0.0, min(1.0, progress / WARM_UP, (1 - progress) / DECAY))


class Trainer:
    """One run: the weights, what moves them, and what is counted on the way."""

    def __init__(
        self, network: Network, weights: Mapping[str, Tensor], feed: Feed, plan: Plan, device: torch.device
    ) -> None:
        self.network, self.feed, self.plan, self.device = network, feed, plan, device
        self.weights = {name: weight.float().to(device).requires_grad_() for name, weight in weights.items()}
        self.optimizer = Optimizer(network.spec, self.weights)
        worth = [ANSWER_WEIGHT if kind in feed.answers else 1 for kind in range(len(feed.kinds))]
        self._worth = torch.tensor(worth, dtype=torch.float32, device=device)
        self._places: dict[int, Places] = {}
        self.tally = Tally(feed.kinds, device)

    def step(self, length: int, rate: float) -> None:
        """One step on fresh rows of this length."""
        loss = self.loss(length)
        loss.backward()  # type: ignore[no-untyped-call]
        self.tally.norm = self.optimizer.step(rate)

    def loss(self, length: int) -> Tensor:
        """What a step makes smaller: the model's loss, its drafts' and its experts' balance."""
        num_rows = max(1, self.plan.tokens // length)
        batch = self.feed.batch(num_rows, length)
        tokens, kinds = self._on_device(batch.tokens), self._on_device(batch.kinds)
        current, following, second = (tokens[:, at : at + length].reshape(-1) for at in range(3))
        places = self._places_of(length)
        half = self._half()
        head = half["lm_head.weight"]
        losses_of = self.network.pieces.token_losses
        hidden, balance = self.network.hidden(half, current, places)
        own = losses_of(hidden, head, following)
        drafted, first_balance = self.network.mtp(half, following, hidden, places)
        first = losses_of(drafted, head, second)
        # A second draft reads the head's own state of one place before, as `reference.mtp_forward` is chained.
        has_state = places.has_before[:, :1]
        fed_back = drafted.roll(1, 0) * has_state
        drafted, second_balance = self.network.mtp(half, following, fed_back, places)
        later = losses_of(drafted, head, second)
        worth, worth_second = self._worth[kinds[:, 1:-1]].flatten(), self._worth[kinds[:, 2:]].flatten()
        self.tally.count(kinds[:, 1:-1].flatten(), own, first, later)
        return (
            _mean(own, worth)
            + MTP_WEIGHTS[0] * _mean(first, worth_second)
            + MTP_WEIGHTS[1] * _mean(later, worth_second * has_state.squeeze(1))
            + BALANCE_WEIGHT * (balance + (first_balance + second_balance) / 2)
        )

    def _on_device(self, values: NDArray[np.int64]) -> Tensor:
        host = torch.from_numpy(values)
        # From pinned memory a copy does not wait for the step before it.
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _half(self) -> dict[str, Tensor]:
        """The weights as products read them: matrices in bfloat16 on a GPU, whatever is small in float32."""
        if self.device.type == "cpu":
            return self.weights
        return {name: w.to(torch.bfloat16) if _is_product(name, w) else w for name, w in self.weights.items()}

    def _places_of(self, length: int) -> Places:
        if length not in self._places:
            num_rows = max(1, self.plan.tokens // length)
            self._places[length] = Places.of(self.network.spec, num_rows, length, self.device)
        return self._places[length]


def _mean(losses: Tensor, worth: Tensor) -> Tensor:
    return (losses * worth).sum() / worth.sum()


def _is_product(name: str, weight: Tensor) -> bool:
    return weight.dim() >= 2 and not name.endswith((".conv1d.weight", ".gate.weight", ".shared_expert_gate.weight"))


@dataclass
class Tally:
    """Losses since the last look, by kind: of the next token, of the first draft and of the second."""

    kinds: tuple[str, ...]
    device: torch.device
    norm: Tensor | None = None
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sums = torch.zeros(4, len(self.kinds), device=self.device)

    @torch.no_grad()
    def count(self, kinds: Tensor, *losses: Tensor) -> None:
        for row, values in enumerate((torch.ones_like(losses[0]), *losses)):
            self.sums[row].index_add_(0, kinds, values.detach())

    def read(self) -> tuple[float, str]:
        """The mean loss of all tokens, and a line with each kind's; starts anew."""
        sums = self.sums.tolist()
        self.clear()
        counts = sums[0]
        total = sum(sums[1]) / max(1.0, sum(counts))
        each = [
            f"{kind} {own / n:.2f}/{first / n:.2f}/{later / n:.2f}"
            for kind, n, own, first, later in zip(self.kinds, *sums, strict=True)
            if n
        ]
        return total, " ".join(each)


def say(clock: Clock, line: str) -> None:
    print(f"{clock.elapsed:6.1f}s {line}", flush=True)  # noqa: T201


def warm_up(trainer: Trainer, clock: Clock) -> Trainer:
    """A trainer that has done a trial step of both lengths, so that nothing fails later for its size or its kernels.

    It takes fewer tokens a step if memory is short, and goes without the compiler if that fails.
    """
    while True:
        try:
            for length in reversed(trainer.plan.lengths):
                trainer.loss(length).backward()  # type: ignore[no-untyped-call]
            for weight in trainer.weights.values():
                weight.grad = None
            trainer.tally.clear()
            return trainer
        except torch.OutOfMemoryError:
            plan = replace(trainer.plan, tokens=trainer.plan.tokens // 2)
            if plan.tokens < max(plan.lengths):
                raise DoesNotFitError(
                    f"A single sequence of {max(plan.lengths)} tokens does not fit into this GPU's memory."
                ) from None
            say(clock, f"out of memory: {plan.tokens} tokens a step from now on")
            network = trainer.network
        except Exception as failure:
            if trainer.network.pieces == Pieces():
                raise
            say(clock, f"not compiled: {type(failure).__name__}: {str(failure)[:2000]}")
            plan, network = trainer.plan, replace(trainer.network, pieces=Pieces())
        weights, feed, device = trainer.weights, trainer.feed, trainer.device
        del trainer
        gc.collect()
        trainer = Trainer(network, {name: w.detach() for name, w in weights.items()}, feed, plan, device)


def run(trainer: Trainer, clock: Clock, save: Save, pool: ExamplePool | None) -> None:
    """Steps until the clock is out, with a line every few seconds and a checkpoint every few minutes."""
    report = Report(trainer, clock, pool)
    short, long = trainer.plan.lengths
    saved = clock.elapsed
    while (progress := clock.progress) < 1:
        is_long = progress >= 1 - LONG_PART
        if pool and is_long:
            pool.only_longest()
        rate = report.caution * learning_rate(progress)
        trainer.step(long if is_long else short, rate)
        report.step(progress, long if is_long else short, rate)
        if clock.elapsed - saved >= SAVE_SECONDS:
            save(trainer.weights)
            saved = clock.elapsed


class Report:
    """Says every few seconds how the run goes, and turns back to the last good weights if it went wrong."""

    def __init__(self, trainer: Trainer, clock: Clock, pool: ExamplePool | None) -> None:
        self._trainer, self._clock, self._pool = trainer, clock, pool
        self._num_steps = self._last_steps = 0
        self._last = clock.elapsed
        self._kept = _copy(trainer.weights)
        self.caution = 1.0
        """What the learning rate is multiplied by: half as much after every turn back."""

    def step(self, progress: float, length: int, rate: float) -> None:
        """After each step; the first one is told of at once."""
        self._num_steps += 1
        if self._clock.elapsed - self._last < LOG_SECONDS and self._num_steps > 1:
            return
        trainer, tokens = self._trainer, self._trainer.plan.tokens
        loss, each = trainer.tally.read()
        now = self._clock.elapsed
        per_second = (self._num_steps - self._last_steps) * tokens / max(1e-9, now - self._last)
        say(
            self._clock,
            f"{100 * progress:5.1f}% step {self._num_steps} {self._num_steps * tokens / 1e6:.0f}M tokens of {length} "
            f"{per_second / 1e3:.0f}k/s lr {rate:.5f} norm {float(trainer.tally.norm or 0):.2f} loss {loss:.3f} | "
            f"{each} | rows made {self._pool.num_made() if self._pool else 0}",
        )
        self._last, self._last_steps = now, self._num_steps
        self._keep_or_turn_back(loss)

    def _keep_or_turn_back(self, loss: float) -> None:
        if math.isfinite(loss):
            self._kept = _copy(self._trainer.weights)
            return
        self.caution /= 2
        _put_back(self._trainer, self._kept)
        say(self._clock, f"the loss is no number: back to the last good weights, learning rate times {self.caution}")


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


@torch.no_grad()
def _put_back(trainer: Trainer, kept: Mapping[str, Tensor]) -> None:
    for name, weight in trainer.weights.items():
        weight.copy_(kept[name])
    trainer.optimizer.forget()


def train_pocket(data: Path, model: Path, out: Path, start: Path | None, clock: Clock) -> None:
    """The real run, with the tokenizer in `model`: workers first, since they are forked, then everything on the GPU."""
    # Here because a toy needs no examples.
    from recipes.pocket.training.examples import SHARES, end_token, example_work

    plan, config = Plan(), pocket_config(first_special_token=end_token(model))
    pool = ExamplePool(plan.pool_rows)
    feed = MixedFeed(TextRows(data), pool, tuple(SHARES))
    pool.start(num_workers(), example_work(data, {name: feed.kinds.index(name) for name in SHARES}, model))
    try:
        trainer = start_trainer(spec_from_config(config), feed, plan, data, start, clock)
        while not pool.is_ready():
            time.sleep(0.1)
        trainer = warm_up(trainer, clock)
        say(clock, f"ready: {trainer.plan.tokens} tokens a step, rows made {pool.num_made()}")
        finish(trainer, clock, partial(save_run, out, config, clock), pool)
    finally:
        pool.stop()


def start_trainer(spec: ModelSpec, feed: Feed, plan: Plan, data: Path, start: Path | None, clock: Clock) -> Trainer:
    """A trainer on the GPU, or where there is none, and slowly, on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    rule, chosen = choose_delta_rule(spec, device, data / "wheels")
    say(clock, f"{device}, torch {torch.__version__}; {chosen}")
    weights = read_weights(start)[1] if start else draw_weights(spec)
    pieces = Pieces.compiled() if device.type == "cuda" else Pieces()
    return Trainer(Network(spec, rule, pieces), weights, feed, plan, device)


def finish(trainer: Trainer, clock: Clock, save: Save, pool: ExamplePool | None = None) -> None:
    """Runs, and whatever happens saves the last weights."""
    try:
        run(trainer, clock, save, pool)
    finally:
        save(trainer.weights)
        say(clock, "saved")


def train_toy(out: Path, start: Path | None, clock: Clock) -> None:
    """The same on a CPU, with a toy's shape and no data."""
    spec: ModelSpec = spec_from_config(TOY)
    device = torch.device("cpu")
    plan = Plan(tokens=512, lengths=(64, 128))
    rule, _ = choose_delta_rule(spec, device, Path())
    weights = read_weights(start)[1] if start else draw_weights(spec)
    trainer = Trainer(Network(spec, rule), weights, ToyFeed(spec.vocab_size), plan, device)
    finish(warm_up(trainer, clock), clock, partial(save_run, out, TOY, clock))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.train", description=__doc__)
    parser.add_argument("--minutes", type=float, default=None, help="the whole run's time; 9, or 0.2 with --toy")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="what `prepare` made; default .pocket")
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="where `prepare` put the tokenizer")
    parser.add_argument("--start", type=Path, default=None, help="a checkpoint to begin with, in a new run")
    parser.add_argument("--resume", action="store_true", help="go on with the run that was stopped in --out")
    parser.add_argument("--toy", action="store_true", help="a toy on the CPU")
    given = parser.parse_args(arguments)
    if given.minutes is not None and given.minutes <= 0:
        parser.error("--minutes must be above 0")

    def run() -> int:
        done = progress_of(given.out) if given.resume else 0.0
        if done < 1:
            clock = Clock(given.minutes or (0.2 if given.toy else 9.0), done)
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
