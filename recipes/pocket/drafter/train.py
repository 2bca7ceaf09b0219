"""`python -m recipes.pocket.drafter.train --prompts FILE --out DIR --seconds 100`: trains the drafter in a given time.

The served build answers the prompts of FILE on the device, thousands of rows at once, and the drafter learns to say
what it said from its features. It also reads examples with their right answers, most of which it would give itself, in
turns with the master, whose features differ a little; answered rows are joined to long contexts. What that leaves of
the time is training, in which the learning rate falls to 0. DIR is written every 20 seconds and at the end, with the
acceptance on held-out prompts. `--toy` makes everything so small that a CPU runs it.
"""

import argparse
import itertools
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

from onebox.model.dflash_parts import load_reference_drafter
from onebox.pocket.ready import MODEL_DIRECTORY, pocket_checkpoint
from onebox.spec.dflash_config import drafter_from_config
from onebox.spec.errors import UsageError
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
_LIMITS = {PROSE: 192, CODE: 192}
_LIMIT = 320
_SAVE_SECONDS, _LOG_SECONDS = 20, 5
_DEPTHS = (7, 15)


@dataclass(frozen=True)
class Sizes:
    """Of the work on the device."""

    rows: int = 4096
    length: int = 640
    """Rows that are answered at once, and their tokens: a step costs its launches, however many rows it has."""
    prompt_tokens: int = 300
    """Of the longest prompt that is answered."""
    read_rows: int = 160
    read_length: int = 768
    """Rows of examples that are read at once, and their tokens."""
    long_length: int = 16384
    long_rows: int = 8
    long_batches: int = 6
    """Rows of long contexts, read at once, and how often."""
    batch: int = 24
    anchors: int = 64
    long_batch: int = 2
    long_anchors: int = 128
    long_every: int = 6
    held_out: int = 8
    """Held-out prompts of each kind."""


_TOY = Sizes(4, 96, 64, 8, 128, 256, 2, 1, 2, 8, 1, 8, 3, 1)
_Part = tuple[Target, AnsweredRows]


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

    def log(self, text: str) -> None:
        """A line with the seconds of the run so far; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        log_progress(f"{self.elapsed:5.1f} s of the run: {text}")

    def answer(self, num_passes: int) -> tuple[AnsweredRows, list[str], AnsweredRows]:
        """Rows answered by the served build; the kinds of the held-out prompts and their rows, one prompt each."""
        prompts, size = self._prompts, self.sizes.prompt_tokens
        chosen = _first_of_each(prompts.held_out, self.sizes.held_out, size)
        training = [index for index in range(len(prompts.training)) if len(prompts.training[index][1]) <= size]
        asked = [[(ids, self._limit(kind))] for kind, ids in chosen]
        parts, measured = [], None
        for number in range(num_passes):
            rows = [self._row(training) for _ in range(self.sizes.rows)]
            scripts = write_scripts(asked + rows if number == 0 else rows, self.sizes.length, self._end)
            self.log(f"answering {scripts.size:,} tokens")
            answered = self.targets[0].answer(scripts, self._message_end)
            said = float(answered.is_answer.float().mean())
            self.log(f"answered; {said:.0%} said by the model")
            if measured is None:
                first, rest = torch.arange(len(answered), device=self.device).tensor_split([len(asked)])
                measured, answered = answered.take(first), answered.take(rest)
            parts.append(answered)
        if measured is None:
            raise UsageError("--passes is below 1: the drafter learns from answers.")
        return AnsweredRows.join(parts), [kind for kind, _ in chosen], measured

    def read(self, rows: AnsweredRows) -> tuple[list[_Part], list[_Part]]:
        """Those rows and the examples; and long contexts, read by either target."""
        short: list[_Part] = [(self.targets[0], rows)]
        for number, (tokens, said) in enumerate(self._example_batches()):
            target = self.targets[number % 2]
            short.append((target, target.read(tokens, said)))
        self.log(f"read {sum(part.tokens.numel() for _, part in short[1:]):,} tokens of examples")
        long: list[_Part] = []
        for number in range(self.sizes.long_batches):
            target = self.targets[number % 2]
            long.append((target, target.read(*self._long_batch(rows))))
        self.log(
            f"read {self.sizes.long_batches} batches of {self.sizes.long_rows} x {self.sizes.long_length:,} tokens"
        )
        return short, long

    def _example_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and `is_answer` [read_rows, read_length] of all examples, one behind the other, cut into rows."""
        examples, end = self._prompts.examples, np.array([self._end], dtype=np.uint16)
        tokens, said = [], []
        for index, start in enumerate(self._prompts.answer_starts.tolist()):
            _, ids = examples[index]
            tokens += [ids, end]
            said.append(np.arange(len(ids) + 1) >= start)
            said[-1][-1] = False
        size = self.sizes.read_rows * self.sizes.read_length
        flat, flags = np.concatenate(tokens).astype(np.int64), np.concatenate(said)
        shape = (self.sizes.read_rows, self.sizes.read_length)
        for begin in range(0, len(flat) - size + 1, size):
            pair = (flat[begin : begin + size], flags[begin : begin + size])
            yield tuple(torch.from_numpy(part).to(self.device).view(shape) for part in pair)  # type: ignore[misc]

    def resume(self, directory: Path) -> None:
        """Takes the weights of an earlier run."""
        _, weights = load_reference_drafter(directory, self.targets[0].spec)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])

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

    def _row(self, chosen: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        """Prompts enough for a row."""
        row: list[tuple[np.ndarray, int]] = []
        while sum(len(ids) + 2 for ids, _ in row) < self.sizes.length:
            kind, ids = self._prompts.training[chosen[self._random.randrange(len(chosen))]]
            row.append((ids, self._limit(kind)))
        return row

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


def _first_of_each(prompts: Prompts, count: int, size: int) -> list[tuple[str, np.ndarray]]:
    """So many prompts of each kind, of at most `size` tokens."""
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    chosen = []
    for index in range(len(prompts)):
        kind, ids = prompts[index]
        if len(ids) <= size and kinds[kind] < count:
            kinds[kind] += 1
            chosen.append((kind, ids))
    return chosen


def _batches(run: _Run, short: Sequence[_Part], long: Sequence[_Part]) -> Iterator[tuple[Target, AnsweredRows, int]]:
    """Batches without an end, and their anchors: short rows, by the number of rows, and every so often long ones."""
    random = Random(0)  # noqa: S311
    sizes, weights = run.sizes, [len(rows) for _, rows in short]
    for number in itertools.count(1):
        is_long = number % sizes.long_every == 0
        target, rows = random.choice(long) if is_long else random.choices(short, weights)[0]
        count = sizes.long_batch if is_long else sizes.batch
        picked = torch.tensor([random.randrange(len(rows)) for _ in range(count)]).to(run.device, non_blocking=True)
        yield target, rows.take(picked), sizes.long_anchors if is_long else sizes.anchors


def _train(
    run: _Run, short: Sequence[_Part], long: Sequence[_Part], out: Path, closing: float, highest_rate: float
) -> None:
    """Until `closing` seconds before the end."""
    start, logged, saved, tally, steps = run.elapsed, run.elapsed, run.elapsed, [], 0
    for target, rows, num_anchors in _batches(run, short, long):
        progress = (run.elapsed - start) / max(1e-9, run.seconds - closing - start)
        if progress >= 1:
            break
        rate = highest_rate * max(0.0, min(1.0, progress / _WARM_UP, (1 - progress) / _FALL))
        tally.append(run.step(target, rows, num_anchors, rate))
        steps += 1
        if run.elapsed - logged > _LOG_SECONDS or steps in (1, 20):
            loss, held = torch.stack(tally).mean(0).tolist()
            run.log(f"{progress:4.0%} step {steps} loss {loss:.3f}, {1 + held:.2f} tokens a step")
            logged, tally = run.elapsed, []
        if run.elapsed - saved > _SAVE_SECONDS:
            run.save(out)
            saved = run.elapsed
    run.save(out)
    run.log(f"trained {steps} steps")


def _report(run: _Run, kinds: Sequence[str], rows: AnsweredRows) -> Iterator[str]:
    """Tokens a step by kind and number of drafts, as lines of Markdown."""
    weights, target = run.shipped_weights(), run.targets[0]
    table = {
        depth: [tokens_a_step(held) for held in held_drafts(run.network, weights, target, rows, depth)]
        for depth in _DEPTHS
    }
    yield "| kind | answers | " + " | ".join(f"{depth} drafts" for depth in _DEPTHS) + " |"
    yield "|---" * (len(_DEPTHS) + 2) + "|"
    for kind in KINDS:
        chosen = [row for row, of in enumerate(kinds) if of == kind]
        cells = []
        for depth in _DEPTHS:
            total = Steps()
            for row in chosen:
                total.add(table[depth][row])
            cells.append(f"{total.tokens_a_step:.2f}")
        yield f"| {kind} | {len(chosen)} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.drafter.train", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=Path(".pocket/drafter-prompts.npz"))
    parser.add_argument("--out", type=Path, default=Path(".pocket/drafter"))
    parser.add_argument("--seconds", type=float, default=100.0, help="of the whole run")
    parser.add_argument("--closing", type=float, default=8.0, help="of them for measuring at the end")
    parser.add_argument("--resume", type=Path, help="a drafter to start from")
    parser.add_argument("--rows", type=int, help="rows that are answered at once")
    parser.add_argument("--rate", type=float, default=_LEARNING_RATE, help="the highest learning rate")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--passes", type=int, default=1, help="over so many rows of prompts, each answered once")
    parser.add_argument("--batch", type=int, help="rows of a training step")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = _TOY if given.toy else Sizes()
    sizes = replace(sizes, batch=given.batch or sizes.batch, rows=given.rows or sizes.rows)
    run = _Run(PromptFile.load(given.prompts), sizes, given.seconds, device)
    run.log(f"{sum(w.numel() for w in run.weights.values()):,} parameters on {device}")
    if given.resume:
        run.resume(given.resume)
    rows, kinds, measured = run.answer(given.passes)
    _train(run, *run.read(rows), given.out, given.closing, given.rate)
    lines = "\n".join(_report(run, kinds, measured)) + "\n"
    (given.out / "acceptance.md").write_text(lines, encoding="utf-8")
    sys.stdout.write(lines)
    run.log("measured")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
