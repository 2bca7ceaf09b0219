"""How well a model predicts given tokens, and how near its predictions are to another's, on the logits themselves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

import torch
from torch import Tensor

from onebox.model.batch import Batch, Stage
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import KVFormat
from recipes.pocket.evaluation.passages import Passage

__all__ = ["Agreement", "Variant", "compare", "predictions"]

_PAGE_TOKENS = 64
_ROWS = 64
"""Logits are made of so many rows at a time."""


@dataclass(frozen=True)
class Variant:
    """A loaded model and the format of its KV cache."""

    model: Qwen35
    kv: KVFormat


@dataclass
class Agreement:
    """Sums over predicted tokens, by passage name, and what they come to."""

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
        """Share of tokens at which both models' likeliest token is the same."""
        return self.num_same / self.num_tokens


def compare(variants: Mapping[str, Variant], passages: Iterable[Passage]) -> dict[str, Agreement]:
    """Every variant on every passage, each held against the first variant."""
    results = {name: Agreement() for name in variants}
    for passage in passages:
        labels = torch.tensor(passage.token_ids[passage.start :])
        expected: Tensor | None = None
        for name, variant in variants.items():
            found = predictions(variant, passage)
            expected = found if expected is None else expected
            losses = -found.gather(1, labels[:, None].to(found.device))
            divergence = (expected.exp() * (expected - found)).sum(-1)
            results[name].add(passage.name, losses, divergence, found.argmax(-1) == expected.argmax(-1))
    return results


@torch.inference_mode()
def predictions(variant: Variant, passage: Passage) -> Tensor:
    """Log-probabilities [n, V] of the tokens that the passage wants predicted, in one prefill through the KV format."""
    model, ids = variant.model, passage.token_ids[:-1]
    num_pages = -(-len(ids) // _PAGE_TOKENS)
    shape = MemoryShape(variant.kv, num_pages + 1, 1, 0, max_pending=1, with_mtp=False)
    memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
    hidden = model.prefill(_prefill_batch(ids, num_pages, model.device), memory)[passage.start - 1 :]
    logits = [model.logits(rows.contiguous()) for rows in hidden.split(_ROWS)]  # type: ignore[no-untyped-call]
    return torch.cat(logits)[:, : model.spec.vocab_size].log_softmax(-1)


def _prefill_batch(ids: tuple[int, ...], num_pages: int, device: torch.device) -> Batch:
    """All tokens of one sequence, in slot 0 and in the pages from 1 on; page 0 is scratch."""
    count = len(ids)
    places = torch.arange(count, device=device)
    cu_rows = torch.tensor([0, count], dtype=torch.int32, device=device)
    none, nowhere = torch.zeros(1, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int64, device=device)
    return Batch(
        token_ids=torch.tensor(ids, device=device),
        positions=places.expand(3, -1).contiguous(),
        cu_rows=cu_rows,
        slots=none,
        num_accepted=none,
        seen=cu_rows[1:],
        page_table=torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=places + _PAGE_TOKENS,
        stages=(Stage(0, count, cu_rows, none, nowhere, nowhere),),
    )
