"""How well a model predicts held-out tokens, and how close its predictions are to another model's.

Computed on the logits, over held-out documents and the right answers of held-out examples.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from onebox.model.batch import Batch
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.model import read_json
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.data.tokens import read_documents
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, render

__all__ = [
    "HeldOutPassage",
    "ModelVariant",
    "PredictionScores",
    "compare",
    "example_passages",
    "predict",
    "text_passages",
]

_LOGIT_ROWS = 64
"""Rows of logits computed at a time."""
_MIN_TOKENS = 32
"""Of a document; shorter ones are skipped."""


@dataclass(frozen=True)
class HeldOutPassage:
    """Tokens, of which those from `start` on are predicted (`start` >= 1). Results are counted under `name`."""

    name: str
    token_ids: tuple[int, ...]
    start: int


def text_passages(data: Path, tokenizer: Tokenizer, count: int, max_tokens: int) -> Iterator[HeldOutPassage]:
    """The first tokens of up to `count` held-out documents of each source; nothing if no text was collected."""
    if not (data / "index.json").exists():
        return
    (end_token,) = tokenizer.encode("<|endoftext|>")
    for source in read_json(data / "index.json"):
        documents = read_documents(data / "tokens" / f"heldout-{source}.bin", end_token)
        long_enough = [document for document in documents if len(document) >= _MIN_TOKENS]
        for document in Random(0).sample(long_enough, min(count, len(long_enough))):  # noqa: S311
            yield HeldOutPassage(source, tuple(map(int, document[:max_tokens])), 1)


def example_passages(
    tokenizer: Tokenizer, template: ChatTemplate, count: int, max_tokens: int
) -> Iterator[HeldOutPassage]:
    """`count` held-out examples of each workload, of which the answers are predicted; longer ones are skipped."""
    for name, generate in MEASURED.items():
        for number in range(count):
            ids, start = render(generate(Random(HELD_OUT_SEED + number)), tokenizer, template)  # noqa: S311
            if len(ids) <= max_tokens:
                yield HeldOutPassage(name, tuple(ids), start)


@dataclass(frozen=True)
class ModelVariant:
    """A loaded model and the format of its KV cache."""

    model: Qwen35
    kv: KVFormat


@dataclass
class PredictionScores:
    """Sums over predicted tokens, by passage name, and the means computed from them."""

    losses: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    num_passages: int = 0
    divergence: float = 0.0
    num_same: int = 0

    def add(self, name: str, losses: Tensor, divergence: Tensor, is_same: Tensor) -> None:
        self.losses[name] = self.losses.get(name, 0.0) + float(losses.sum())
        self.counts[name] = self.counts.get(name, 0) + len(losses)
        self.num_passages += 1
        self.divergence += float(divergence.sum())
        self.num_same += int(is_same.sum())

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.values())

    @property
    def perplexities(self) -> dict[str, float]:
        return {name: exp(self.losses[name] / self.counts[name]) for name in self.losses}

    @property
    def perplexity(self) -> float:
        """Of all tokens together."""
        return exp(sum(self.losses.values()) / self.num_tokens)

    @property
    def mean_divergence(self) -> float:
        """Mean of KL(first model || this one) over the whole vocabulary, in nats a token."""
        return self.divergence / self.num_tokens

    @property
    def top_agreement(self) -> float:
        """Share of tokens for which both models have the same most likely token."""
        return self.num_same / self.num_tokens


def compare(variants: Mapping[str, ModelVariant], passages: Iterable[HeldOutPassage]) -> dict[str, PredictionScores]:
    """The scores of every variant on all passages; each is compared with the first variant."""
    results = {name: PredictionScores() for name in variants}
    for passage in passages:
        labels = torch.tensor(passage.token_ids[passage.start :])
        expected: Tensor | None = None
        for name, variant in variants.items():
            found = predict(variant, passage)
            expected = found if expected is None else expected
            losses = -found.gather(1, labels[:, None].to(found.device))
            divergence = (expected.exp() * (expected - found)).sum(-1)
            results[name].add(passage.name, losses, divergence, found.argmax(-1) == expected.argmax(-1))
    return results


@torch.inference_mode()
def predict(variant: ModelVariant, passage: HeldOutPassage) -> Tensor:
    """Log-probabilities [n, V] for the predicted tokens of the passage, from one prefill with the KV format."""
    model, ids = variant.model, passage.token_ids[:-1]
    num_pages = -(-len(ids) // PAGE_TOKENS)
    shape = MemoryShape(variant.kv, num_pages + 1, 1, 0, max_pending=1, with_mtp=False)
    memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
    hidden = model.prefill(_prefill_batch(ids, num_pages, model.device), memory)[passage.start - 1 :]
    logits = [model.logits(rows.contiguous()) for rows in hidden.split(_LOGIT_ROWS)]  # type: ignore[no-untyped-call]
    return torch.cat(logits)[:, : model.spec.vocab_size].log_softmax(-1)


def _prefill_batch(ids: tuple[int, ...], num_pages: int, device: torch.device) -> Batch:
    """All tokens of one sequence, in slot 0 and in the pages from 1 on; page 0 is scratch."""
    count = len(ids)
    places = torch.arange(count, device=device)
    cu_rows = torch.tensor([0, count], dtype=torch.int32, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    return Batch(
        token_ids=torch.tensor(ids, device=device),
        positions=places.expand(3, -1).contiguous(),
        cu_rows=cu_rows,
        slots=none,
        num_accepted=none,
        seen=cu_rows[1:],
        page_table=torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=places + PAGE_TOKENS,
        saves=torch.full((count,), -1, dtype=torch.int32, device=device),
    )
