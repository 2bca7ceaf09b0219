"""The training loop: loss, optimizer step, progress lines, and recovery if the loss diverges."""

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onebox.spec.errors import DoesNotFitError
from recipes.pocket.training.feed import UNSEEN, ExamplePool, Feed, TrainingBatch
from recipes.pocket.training.network import BatchLayout, LayerFunctions, TrainingNetwork, Weights
from recipes.pocket.training.optimizer import Optimizer, matrix_sides
from recipes.pocket.training.schedule import LengthAt, RunClock, ShareAt, learning_rate, text_length, whole_share
from recipes.pocket.training.vision import (
    PREFIX,
    READER,
    TowerFunctions,
    encode_pictures,
    place_pictures,
    reading_loss,
    under_prefix,
)

__all__ = ["BatchShape", "LossTally", "RunMonitor", "Trainer", "log_step", "run_and_save", "warm_up"]

Save = Callable[[Weights], None]

MTP_WEIGHTS = (0.3, 0.15)
"""Weights of the first and the second draft's loss; the model's own loss has weight 1."""
BALANCE_WEIGHT = 0.01
READER_WEIGHT = 0.3
LOG_SECONDS = 10
SAVE_SECONDS = 120


@dataclass(frozen=True)
class BatchShape:
    """Tokens of a step (rows times length), and the lengths of rows, shortest first."""

    tokens: int = 98_304
    lengths: tuple[int, ...] = (1024, 8192)
    length_at: LengthAt = text_length
    """Which of them a step has."""

    def num_rows(self, length: int) -> int:
        return max(1, self.tokens // length)

    @property
    def pool_rows(self) -> dict[int, int]:
        """Rows of examples kept in the pool, by length: the same number of tokens of each."""
        return {length: max(1, 2**24 // length) for length in self.lengths}


class Trainer:
    """One run: the weights, their optimizer, and the losses counted so far."""

    def __init__(
        self,
        network: TrainingNetwork,
        weights: Mapping[str, Tensor],
        feed: Feed,
        shape: BatchShape,
        device: torch.device,
        text_share: ShareAt = whole_share,
    ) -> None:
        self.network, self.feed, self.shape, self.device = network, feed, shape, device
        self.text_share = text_share
        self.weights = {name: weight.float().to(device).requires_grad_() for name, weight in weights.items()}
        self.optimizers = _optimizers(network, self.weights)
        kind_weights = [feed.weights.get(kind, 1.0) for kind in range(len(feed.kinds))]
        self._kind_weights = torch.tensor(kind_weights, dtype=torch.float32, device=device)
        self._layouts: dict[int, BatchLayout] = {}
        self.tally = LossTally(feed.kinds, device)

    def step(self, length: int, rate: float, text_share: float = 1.0) -> None:
        """One step on new rows of this length; the text model's learning rate is a share of `rate`."""
        loss = self.loss(length)
        loss.backward()  # type: ignore[no-untyped-call]
        # A batch without pictures leaves the tower as it is.
        rates = zip(self.optimizers, (rate * text_share, rate), strict=False)
        norms = [optimizer.step(own_rate) for optimizer, own_rate in rates if optimizer.has_gradients]
        self.tally.norm = torch.stack(norms).max()

    def loss(self, length: int) -> Tensor:
        """The loss of one batch: the model's own, its two drafts' and the experts' balance."""
        batch = self.feed.batch(self.shape.num_rows(length), length)
        tokens, kinds = self._on_device(batch.tokens), self._on_device(batch.kinds)
        current, following, second = (tokens[:, at : at + length].reshape(-1) for at in range(3))
        layout = self._layout(length)
        if batch.positions is not None:
            layout = layout.at(self.network.spec, self._on_device(batch.positions).flatten(1))
        weights = self._compute_weights()
        head = weights["lm_head.weight"]
        token_losses = self.network.functions.token_losses
        embedded, reading = self._with_pictures(weights, current, batch)
        hidden, balance = self.network.hidden(weights, embedded, layout)
        own = token_losses(hidden, head, following)
        drafted, first_balance = self.network.mtp(weights, following, hidden, layout)
        first = token_losses(drafted, head, second)
        # The second draft reads the MTP head's own state one position earlier, as `reference.mtp_forward` is chained.
        has_state = layout.has_before[:, :1]
        fed_back = drafted.roll(1, 0) * has_state
        drafted, second_balance = self.network.mtp(weights, following, fed_back, layout)
        later = token_losses(drafted, head, second)
        next_kinds, second_kinds = kinds[:, 1:-1].flatten(), kinds[:, 2:].flatten()
        self.tally.count(next_kinds, own, first, later)
        next_weight, second_weight = self._kind_weights[next_kinds], self._kind_weights[second_kinds]
        return (
            _weighted_mean(own, next_weight)
            + MTP_WEIGHTS[0] * _weighted_mean(first, second_weight)
            + MTP_WEIGHTS[1] * _weighted_mean(later, second_weight * has_state.squeeze(1))
            + BALANCE_WEIGHT * (balance + (first_balance + second_balance) / 2)
            + READER_WEIGHT * reading
        )

    def _with_pictures(self, weights: Weights, tokens: Tensor, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """The tokens' embeddings [N, H], those of pictures in their places, and the loss of reading characters."""
        embedded, reading = self.network.embed(weights, tokens), tokens.new_zeros((), dtype=torch.float32)
        vision = self.network.spec.vision
        if vision is None or not batch.pictures:
            return embedded, reading
        functions = self.network.tower_functions
        batches = [pictures.to(self.device) for pictures in batch.pictures]
        encoded = encode_pictures(vision, under_prefix(weights, PREFIX), batches, functions)
        for pictures, rows in zip(batches, encoded.rows, strict=True):
            embedded = place_pictures(embedded, pictures, rows)
        lengths = [pictures.labels.shape[:2].numel() for pictures in batches]
        reading, right = reading_loss(under_prefix(weights, READER), encoded, lengths, functions)
        self.tally.read_rightly(right)
        return embedded, reading

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights` back and clears the optimizer's moments."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
        for optimizer in self.optimizers:
            optimizer.reset()

    def _on_device(self, values: NDArray[np.int64]) -> Tensor:
        host = torch.from_numpy(values)
        # From pinned memory the copy does not wait for the previous step.
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _compute_weights(self) -> dict[str, Tensor]:
        """The weights as the network reads them: on a GPU matrices in bfloat16, small tensors in float32."""
        if self.device.type == "cpu":
            return self.weights
        return {name: w.to(torch.bfloat16) if _is_matrix(name, w) else w for name, w in self.weights.items()}

    def _layout(self, length: int) -> BatchLayout:
        if length not in self._layouts:
            num_rows = self.shape.num_rows(length)
            self._layouts[length] = BatchLayout.of(self.network.spec, num_rows, length, self.device)
        return self._layouts[length]


def _optimizers(network: TrainingNetwork, weights: Mapping[str, Tensor]) -> list[Optimizer]:
    """One of the text model and one of the tower, if there is one, each with its own clipping."""
    sides = matrix_sides(network.spec)
    seen = {name: weight for name, weight in weights.items() if name.startswith((PREFIX, READER))}
    text = {name: weight for name, weight in weights.items() if name not in seen}
    return [Optimizer(sides, text), *([Optimizer(sides, seen)] if seen else [])]


def _weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum()


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() >= 2 and not name.endswith((".conv1d.weight", ".gate.weight", ".shared_expert_gate.weight"))


@dataclass
class LossTally:
    """Sums of losses since the last read, by kind: of the next token, of the first and of the second draft."""

    kinds: tuple[str, ...]
    device: torch.device
    norm: Tensor | None = None
    sums: Tensor = field(init=False)
    """[4, kinds]: counts, then the three losses."""

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sums = torch.zeros(4, len(self.kinds), device=self.device)
        self.characters = torch.zeros(2, device=self.device)
        """Batches of pictures, and the sum of their shares of characters that the reader named rightly."""

    def read_rightly(self, share: Tensor) -> None:
        self.characters += torch.stack([torch.ones_like(share), share.detach()])

    @torch.no_grad()
    def count(self, kinds: Tensor, *losses: Tensor) -> None:
        for row, values in enumerate((torch.ones_like(losses[0]), *losses)):
            self.sums[row].index_add_(0, kinds, values.detach())

    def read(self) -> tuple[float, str]:
        """The mean loss of all tokens, and a line with the losses of each kind; clears the sums."""
        sums, (batches, right) = self.sums.tolist(), self.characters.tolist()
        self.clear()
        if UNSEEN in self.kinds:
            for row in sums:
                row[self.kinds.index(UNSEEN)] = 0.0
        counts = sums[0]
        total = sum(sums[1]) / max(1.0, sum(counts))
        each = [
            f"{kind} {own / n:.2f}/{first / n:.2f}/{later / n:.2f}"
            for kind, n, own, first, later in zip(self.kinds, *sums, strict=True)
            if n
        ]
        if batches:
            each.append(f"characters {right / batches:.1%}")
        return total, " ".join(each)


def log_step(clock: RunClock, line: str) -> None:
    print(f"{clock.elapsed:6.1f}s {line}", flush=True)  # noqa: T201


def warm_up(trainer: Trainer, clock: RunClock) -> Trainer:
    """A trainer that has computed a trial loss of both lengths, so that compilation and memory errors come first.

    It halves the tokens per step while memory is short, and runs without the compiler if compilation fails.
    """
    while True:
        try:
            for length in reversed(trainer.shape.lengths):
                trainer.loss(length).backward()  # type: ignore[no-untyped-call]
            for weight in trainer.weights.values():
                weight.grad = None
            trainer.tally.clear()
            return trainer
        except torch.OutOfMemoryError:
            shape = replace(trainer.shape, tokens=trainer.shape.tokens // 2)
            if shape.tokens < max(shape.lengths):
                raise DoesNotFitError(
                    f"A single sequence of {max(shape.lengths)} tokens does not fit into this GPU's memory."
                ) from None
            log_step(clock, f"out of memory: continuing with {shape.tokens} tokens a step")
            network = trainer.network
        except Exception as failure:
            if trainer.network.functions == LayerFunctions():
                raise
            log_step(clock, f"not compiled: {type(failure).__name__}: {str(failure)[:2000]}")
            shape, network = trainer.shape, _less_compiled(trainer.network)
        weights, feed, device, share = trainer.weights, trainer.feed, trainer.device, trainer.text_share
        del trainer
        gc.collect()
        trainer = Trainer(network, {name: w.detach() for name, w in weights.items()}, feed, shape, device, share)


def _less_compiled(network: TrainingNetwork) -> TrainingNetwork:
    """Without the compiled tower first; it costs a fraction of the text model's functions."""
    if network.tower_functions != TowerFunctions():
        return replace(network, tower_functions=TowerFunctions())
    return replace(network, functions=LayerFunctions())


def run_and_save(trainer: Trainer, clock: RunClock, save: Save, pool: ExamplePool | None = None) -> None:
    """Trains until the time is over; saves the weights at the end, also after an error or an interrupt."""
    try:
        _run(trainer, clock, save, pool)
    finally:
        save(trainer.weights)
        log_step(clock, "saved")


def _run(trainer: Trainer, clock: RunClock, save: Save, pool: ExamplePool | None) -> None:
    monitor = RunMonitor(trainer, clock, pool)
    shape, saved = trainer.shape, clock.elapsed
    while (progress := clock.progress) < 1 and not clock.is_over:
        length = shape.length_at(progress, monitor.num_steps, shape.lengths)
        if pool and shape.length_at is text_length and length == max(shape.lengths):
            pool.only_longest()
        rate = monitor.rate_factor * learning_rate(progress)
        trainer.step(length, rate, trainer.text_share(progress))
        monitor.step(progress, length, rate)
        if clock.elapsed - saved >= SAVE_SECONDS:
            save(trainer.weights)
            saved = clock.elapsed


class RunMonitor:
    """Logs the run every LOG_SECONDS, and restores the last good weights if the loss is not finite."""

    def __init__(self, trainer: Trainer, clock: RunClock, pool: ExamplePool | None) -> None:
        self._trainer, self._clock, self._pool = trainer, clock, pool
        self.num_steps = self._last_steps = 0
        self._last = clock.elapsed
        self._good_weights = _copy(trainer.weights)
        self.rate_factor = 1.0
        """Multiplies the learning rate; halved after every restore."""

    def step(self, progress: float, length: int, rate: float) -> None:
        """Called after each step; always logs the first one."""
        self.num_steps += 1
        if self._clock.elapsed - self._last < LOG_SECONDS and self.num_steps > 1:
            return
        trainer, tokens = self._trainer, self._trainer.shape.tokens
        loss, each = trainer.tally.read()
        now = self._clock.elapsed
        per_second = (self.num_steps - self._last_steps) * tokens / max(1e-9, now - self._last)
        log_step(
            self._clock,
            f"{100 * progress:5.1f}% step {self.num_steps} {self.num_steps * tokens / 1e6:.0f}M tokens of {length} "
            f"{per_second / 1e3:.0f}k/s lr {rate:.5f} norm {float(trainer.tally.norm or 0):.2f} loss {loss:.3f} | "
            f"{each} | rows made {self._pool.num_made() if self._pool else 0}",
        )
        self._last, self._last_steps = now, self.num_steps
        self._keep_or_restore(loss)

    def _keep_or_restore(self, loss: float) -> None:
        if math.isfinite(loss):
            self._good_weights = _copy(self._trainer.weights)
            return
        self.rate_factor /= 2
        self._trainer.restore(self._good_weights)
        log_step(
            self._clock,
            f"the loss is not finite: restored the last good weights, learning rate times {self.rate_factor}",
        )


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}
