"""`python -m recipes.pocket.drafter.train --prompts FILE --out DIR --seconds 240`: trains the drafter in a given time.

The target answers the prompts of FILE on the device, half of the rows as the master and half as the served build, and
the drafter learns to say what they said from their features. The time decides all: a fifth goes to answers, a tenth to
long rows, the rest to training, in which the learning rate falls to 0. DIR is written every 30 seconds and at the end,
with the acceptance on held-out prompts. `--toy` makes everything so small that a CPU runs it in seconds.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from safetensors.torch import save_file
from torch import Tensor

from onebox.pocket.ready import MODEL_DIRECTORY, pocket_checkpoint
from onebox.spec.dflash_config import drafter_from_config
from onebox.spec.model import read_config
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.drafter.measure import Steps, embed_blocks, held_drafts, labels_of, tokens_a_step
from recipes.pocket.drafter.network import DrafterNetwork, draw_drafter
from recipes.pocket.drafter.prompts import CODE, KINDS, PROSE, PromptFile, Prompts
from recipes.pocket.drafter.shape import drafter_config
from recipes.pocket.drafter.target import AnsweredRows, Target, write_scripts
from recipes.pocket.training.optimizer import Optimizer

__all__ = ["main"]

_DECAY = 7.0
"""The loss of draft j has weight exp(-(j - 1) / 7): the first ones decide how many hold."""
_LEARNING_RATE = 3e-3
_WARM_UP, _FALL = 0.02, 0.6
_ANSWER_SHARE, _LONG_SHARE = 0.22, 0.32
"""Shares of the time by which the answers, and then the long rows, are made."""
_LIMITS = {PROSE: 192, CODE: 192}
_LIMIT = 384
_SAVE_SECONDS, _LOG_SECONDS = 30, 10


@dataclass(frozen=True)
class Sizes:
    """Of the work on the device."""

    rows: int = 1024
    length: int = 2048
    """Rows that are answered at once, and their tokens."""
    long_length: int = 16384
    long_rows: int = 8
    """Rows of long contexts that are read at once."""
    batch: int = 12
    anchors: int = 128
    long_batch: int = 2
    long_every: int = 6
    held_out_length: int = 1024
    held_out: int = 32
    """Held-out prompts of each kind."""


_TOY = Sizes(6, 96, 256, 2, 2, 8, 1, 3, 160, 1)


class _Run:
    """One training run: its data, its drafter and its clock."""

    def __init__(self, prompts: PromptFile, sizes: Sizes, seconds: float, device: torch.device) -> None:
        self.began, self.seconds, self.sizes, self.device = time.monotonic(), seconds, sizes, device
        target_spec = read_config(MODEL_DIRECTORY)
        self.config = drafter_config(target_spec)
        self.spec = drafter_from_config(self.config)
        tokenizer = Tokenizer.load(MODEL_DIRECTORY)
        [self._end], [self._message_end] = (tokenizer.encode(mark) for mark in ("<|endoftext|>", "<|im_end|>"))
        self.targets = [
            Target(directory, self.spec.target_layer_ids, device)
            for directory in (pocket_checkpoint(), MODEL_DIRECTORY)
        ]
        self._prompts, self._random = prompts, Random(0)  # noqa: S311 - a fixed order, nothing secret
        self.network = DrafterNetwork(self.spec)
        drawn = draw_drafter(self.spec)
        self.weights = {name: weight.to(device).requires_grad_() for name, weight in drawn.items()}
        sides = {m.plain_tensor: (m.shape[0], m.shape[1]) for m in self.spec.modules() if m.is_matrix}
        self._optimizer = Optimizer(sides, self.weights)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float:
        """Of the time that has passed."""
        return self.elapsed / self.seconds

    def answer(self) -> list[tuple[Target, AnsweredRows]]:
        """Answered rows by target, as many as the time allows; at least one batch of each."""
        parts: list[tuple[Target, AnsweredRows]] = []
        while len(parts) < len(self.targets) or self.share < _ANSWER_SHARE:
            target = self.targets[len(parts) % len(self.targets)]
            rows = target.answer(self._scripts(), self._message_end)
            parts.append((target, rows))
            said = float(rows.is_answer.float().mean())
            log_progress(
                f"answered {rows.tokens.numel():,} tokens, {said:.0%} said by the model ({self.elapsed:.0f} s)"
            )
        return parts

    def long_rows(self, parts: Sequence[tuple[Target, AnsweredRows]]) -> list[tuple[Target, AnsweredRows]]:
        """Rows of long contexts: documents, and answered rows behind them, read by the target that answered."""
        made: list[tuple[Target, AnsweredRows]] = []
        while len(made) < len(self.targets) or self.share < _LONG_SHARE:
            target, rows = parts[len(made) % len(parts)]
            made.append((target, target.read(*self._long_batch(rows))))
        log_progress(f"read {len(made)} batches of {self.sizes.long_length:,} tokens ({self.elapsed:.0f} s)")
        return made

    def held_out(self) -> tuple[list[str], AnsweredRows]:
        """The kinds of the held-out prompts, and their answers by the first target, one prompt a row."""
        chosen = _first_of_each(self._prompts.held_out, self.sizes.held_out)
        rows = [[(ids[: self.sizes.held_out_length // 2], self._limit(kind))] for kind, ids in chosen]
        scripts = write_scripts(rows, self.sizes.held_out_length, self._end)
        return [kind for kind, _ in chosen], self.targets[0].answer(scripts, self._message_end)

    def step(self, target: Target, rows: AnsweredRows, num_anchors: int, rate: float) -> Tensor:
        """One step on so many anchors of each row; returns [loss, mean drafts that hold]."""
        anchors = _draw_anchors(rows.is_answer, num_anchors)
        num_drafts = self.spec.max_drafts
        right, counts = labels_of(rows, anchors, num_drafts)
        embedded = embed_blocks(self.network, target, rows, anchors, num_drafts)
        hidden = self.network.hidden(self._compute_weights(), rows.features, embedded, anchors)[:, :, 1:]
        logits = F.linear(hidden.to(target.head.dtype), target.head).float()
        fading = torch.exp(-torch.arange(num_drafts, device=self.device) / _DECAY)
        losses = F.cross_entropy(logits.flatten(0, 2), right.flatten(), reduction="none").view(right.shape)
        share = fading * counts
        loss = (losses * share).sum() / share.sum().clamp(min=1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(rate)
        held = ((logits.argmax(-1) == right) & counts).cumprod(-1).sum(-1).float()
        return torch.stack([loss.detach(), held.mean()])

    def save(self, out: Path) -> None:
        """The drafter's directory: written whole, then put in place."""
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: w.detach().to(torch.bfloat16).cpu().contiguous() for name, w in self.weights.items()}
        save_file(tensors, out / "model.safetensors.partial", metadata={"format": "pt"})
        (out / "model.safetensors.partial").rename(out / "model.safetensors")

    def shipped_weights(self) -> dict[str, Tensor]:
        """The weights as they are saved: rounded to BF16."""
        dtype = self.targets[0].head.dtype
        return {name: _rounded(weight.detach(), dtype) for name, weight in self.weights.items()}

    def _compute_weights(self) -> dict[str, Tensor]:
        dtype = self.targets[0].head.dtype
        return {name: w.to(dtype) if w.dim() == 2 else w for name, w in self.weights.items()}

    def _scripts(self) -> np.ndarray:
        prompts, length = self._prompts.training, self.sizes.length
        rows = []
        for _ in range(self.sizes.rows):
            row: list[tuple[np.ndarray, int]] = []
            # An answer takes at least one token, so prompts of `length` tokens never leave a row unfilled.
            while sum(len(ids) + 2 for ids, _ in row) < length:
                kind, ids = prompts[self._random.randrange(len(prompts))]
                row.append((ids, self._limit(kind)))
            rows.append(row)
        return write_scripts(rows, length, self._end)

    def _long_batch(self, rows: AnsweredRows) -> tuple[Tensor, Tensor]:
        """Tokens and `is_answer` [B, long_length]: a share of documents, then answered rows, joined."""
        length, documents = self.sizes.long_length, self._prompts.documents
        tokens, said = [], []
        for _ in range(self.sizes.long_rows):
            num_document = self._random.choice((0, length // 2, 3 * length // 4))
            start = self._random.randrange(max(1, len(documents) - num_document))
            parts = [torch.from_numpy(documents[start : start + num_document].astype(np.int64)).to(self.device)]
            num_parts = -(-(length - len(parts[0])) // rows.tokens.shape[1])
            picked = [self._random.randrange(len(rows)) for _ in range(num_parts)]
            tokens.append(torch.cat([*parts, *(rows.tokens[row] for row in picked)])[:length])
            silent = torch.zeros_like(parts[0], dtype=torch.bool)
            said.append(torch.cat([silent, *(rows.is_answer[row] for row in picked)])[:length])
        return torch.stack(tokens), torch.stack(said)

    @staticmethod
    def _limit(kind: str) -> int:
        return _LIMITS.get(kind, _LIMIT)


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = weight.to(torch.bfloat16)
    return rounded.to(dtype) if weight.dim() == 2 else rounded.float()


def _draw_anchors(is_answer: Tensor, count: int) -> Tensor:
    """Random positions of answers, [B, count]; a row with fewer has some twice."""
    weights = is_answer.float() + 1e-9
    return torch.multinomial(weights, count, replacement=True).sort(dim=1).values


def _first_of_each(prompts: Prompts, count: int) -> list[tuple[str, np.ndarray]]:
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    chosen = []
    for index in range(len(prompts)):
        kind, ids = prompts[index]
        kinds[kind] += 1
        if kinds[kind] <= count:
            chosen.append((kind, ids))
    return chosen


def _batches(
    run: _Run, parts: Sequence[tuple[Target, AnsweredRows]], long: Sequence[tuple[Target, AnsweredRows]]
) -> Iterator[tuple[Target, AnsweredRows]]:
    """Batches without an end: short rows, and every so often long ones."""
    random = torch.Generator().manual_seed(0)
    number = 0
    while True:
        number += 1
        is_long = number % run.sizes.long_every == 0
        target, rows = (long if is_long else parts)[
            int(torch.randint(len(long if is_long else parts), (1,), generator=random))
        ]
        count = run.sizes.long_batch if is_long else run.sizes.batch
        yield target, rows.take(torch.randint(len(rows), (count,), generator=random).to(run.device))


def _train(run: _Run, parts: Sequence[tuple[Target, AnsweredRows]], out: Path, closing: float) -> None:
    """Until `closing` seconds before the end."""
    long = run.long_rows(parts)
    start, logged, saved, tally, steps = run.elapsed, run.elapsed, run.elapsed, [], 0
    for target, rows in _batches(run, parts, long):
        progress = (run.elapsed - start) / max(1e-9, run.seconds - closing - start)
        if progress >= 1:
            break
        rate = _LEARNING_RATE * max(0.0, min(1.0, progress / _WARM_UP, (1 - progress) / _FALL))
        tally.append(run.step(target, rows, run.sizes.anchors, rate))
        steps += 1
        if run.elapsed - logged > _LOG_SECONDS:
            loss, held = torch.stack(tally).mean(0).tolist()
            log_progress(
                f"{progress:4.0%} step {steps} loss {loss:.3f}, {1 + held:.2f} tokens a step ({run.elapsed:.0f} s)"
            )
            logged, tally = run.elapsed, []
        if run.elapsed - saved > _SAVE_SECONDS:
            run.save(out)
            saved = run.elapsed
    run.save(out)
    log_progress(f"trained {steps} steps ({run.elapsed:.0f} s)")


def _report(run: _Run, kinds: Sequence[str], rows: AnsweredRows) -> Iterator[str]:
    """Tokens a step by kind and number of drafts, as lines of Markdown."""
    depths = (3, 7, 15)
    weights = run.shipped_weights()
    table = {
        depth: [tokens_a_step(held) for held in held_drafts(run.network, weights, run.targets[0], rows, depth)]
        for depth in depths
    }
    yield "| kind | answers | " + " | ".join(f"{depth} drafts" for depth in depths) + " |"
    yield "|---" * (len(depths) + 2) + "|"
    for kind in KINDS:
        chosen = [row for row, of in enumerate(kinds) if of == kind]
        cells = []
        for depth in depths:
            total = Steps()
            for row in chosen:
                total.add(table[depth][row])
            cells.append(f"{total.tokens_a_step:.2f}")
        yield f"| {kind} | {len(chosen)} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.drafter.train", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=Path(".pocket/drafter-prompts.npz"))
    parser.add_argument("--out", type=Path, default=Path(".pocket/drafter"))
    parser.add_argument("--seconds", type=float, default=240.0, help="of the whole run")
    parser.add_argument("--closing", type=float, default=20.0, help="of them for measuring at the end")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--batch", type=int, help="rows of a training step")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = _TOY if given.toy else Sizes()
    sizes = replace(sizes, batch=given.batch) if given.batch else sizes
    run = _Run(PromptFile.load(given.prompts), sizes, given.seconds, device)
    log_progress(f"{sum(w.numel() for w in run.weights.values()):,} parameters on {device}")
    kinds, measured = run.held_out()
    _train(run, run.answer(), given.out, given.closing)
    lines = "\n".join(_report(run, kinds, measured)) + "\n"
    (given.out / "acceptance.md").write_text(lines, encoding="utf-8")
    sys.stdout.write(lines)
    log_progress("measured")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
