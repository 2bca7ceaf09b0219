"""An evaluation as Markdown tables and as JSON. Computes nothing but shares and sums of what was measured."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipes.pocket.evaluation.agreement import Agreement
from recipes.pocket.evaluation.claims import Claim, claims
from recipes.pocket.evaluation.tasks import TaskResult

__all__ = ["BuildResult", "Evaluation"]

_KEPT = "1st draft kept | 2nd draft kept after it"


@dataclass(frozen=True)
class BuildResult:
    """A build: the bytes of its tensors, and a few answers by it, whose drafts its own MTP head made."""

    name: str
    num_bytes: int
    tasks: list[TaskResult]


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured of one checkpoint, and where."""

    where: dict[str, str]
    tasks: list[TaskResult]
    served: list[TaskResult]
    """Answers by the build that `onebox serve` runs."""
    continuations: list[TaskResult]
    """Held-out texts gone on with."""
    held_out: Agreement
    """How well the master predicts held-out texts and right answers."""
    builds: list[BuildResult]
    agreements: dict[str, Agreement]
    """By "build / KV format"; the first is the checkpoint itself with a bf16 cache."""
    kv_bytes: dict[str, int]
    """Bytes of a token in the cache, by KV format."""

    @property
    def claims(self) -> list[Claim]:
        return list(claims({task.name: task for task in self.tasks}))

    def as_markdown(self) -> str:
        sections = {
            "Answers by the master": _task_table(self.tasks),
            "Answers by the build that is served": _task_table(self.served),
            "Text that was held out": _text_table(self.continuations, self.held_out),
            "Right answers": _answer_table(self._answers, self.held_out),
            "Builds": _build_table(self.builds),
            "Builds and KV formats": self._agreement_table(),
            "What must hold": _claim_table(self.claims),
        }
        where = ", ".join(f"{key} {value}" for key, value in self.where.items())
        parts = [f"Measured: {where}."]
        parts += [f"### {title}\n\n" + "\n".join(table) for title, table in sections.items()]
        return "\n\n".join(parts)

    def as_json(self) -> str:
        """One line with all numbers of the tables."""
        return json.dumps(
            {
                **self.where,
                "tasks": [asdict(task) for task in self.tasks],
                "served": [asdict(task) for task in self.served],
                "continuations": [asdict(task) for task in self.continuations],
                "held_out": _agreement(self.held_out),
                "builds": [asdict(each) for each in self.builds],
                "agreements": {name: _agreement(each) for name, each in self.agreements.items()},
                "kv_bytes_per_token": self.kv_bytes,
                "claims": [{**asdict(claim), "holds": claim.holds} for claim in self.claims],
            }
        )

    @property
    def _first(self) -> Agreement:
        return next(iter(self.agreements.values()))

    @property
    def _answers(self) -> list[str]:
        texts = {task.name for task in self.continuations}
        return [name for name in self.held_out.counts if name not in texts]

    def _agreement_table(self) -> Iterator[str]:
        passages, tokens = self._first.num_passages, self._first.num_tokens
        yield f"Over {tokens:,} predicted tokens of {passages} passages, each in one prefill."
        yield ""
        yield "| build / KV cache | bytes a token | perplexity | mean KL to the first | same likeliest token |"
        yield "|---|---|---|---|---|"
        for name, each in self.agreements.items():
            kv_bytes = self.kv_bytes[name.rpartition(" / ")[2]]
            numbers = f"{each.perplexity:.3f} | {each.mean_divergence:.5f} | {each.top_agreement:.2%}"
            yield f"| {name} | {kv_bytes:,} | {numbers} |"


def _agreement(each: Agreement) -> Mapping[str, Any]:
    return {
        "perplexity": each.perplexity,
        "mean_kl": each.mean_divergence,
        "top_agreement": each.top_agreement,
        "perplexities": each.perplexities,
        "tokens": each.counts,
    }


def _task_table(tasks: Sequence[TaskResult]) -> Iterator[str]:
    yield f"| task | answers | prompt tokens | scores | {_KEPT} |"
    yield "|---|---|---|---|---|---|"
    for task in tasks:
        yield f"| {task.name} | {task.num} | {task.mean_prompt_tokens:.0f} | {task.scores_text} | {task.kept_text} |"


def _text_table(continuations: Sequence[TaskResult], held_out: Agreement) -> Iterator[str]:
    yield f"| text | perplexity | tokens | continuations | {_KEPT} |"
    yield "|---|---|---|---|---|---|"
    for task in continuations:
        perplexity, tokens = held_out.perplexities[task.name], held_out.counts[task.name]
        yield f"| {task.name} | {perplexity:.2f} | {tokens:,} | {task.num} | {task.kept_text} |"


def _answer_table(names: Sequence[str], held_out: Agreement) -> Iterator[str]:
    yield "| workload | perplexity of the right answer | tokens |"
    yield "|---|---|---|"
    for name in names:
        yield f"| {name} | {held_out.perplexities[name]:.3f} | {held_out.counts[name]:,} |"


def _build_table(builds: Sequence[BuildResult]) -> Iterator[str]:
    yield f"| build | MB | task | answers | scores | {_KEPT} |"
    yield "|---|---|---|---|---|---|---|"
    for each in builds:
        for number, task in enumerate(each.tasks):
            name, size = (each.name, f"{each.num_bytes / 1e6:.1f}") if number == 0 else ("", "")
            yield f"| {name} | {size} | {task.name} | {task.num} | {task.scores_text} | {task.kept_text} |"


def _claim_table(found: Sequence[Claim]) -> Iterator[str]:
    yield "| asked | at least | found | of | |"
    yield "|---|---|---|---|---|"
    for claim in found:
        verdict = "holds" if claim.holds else "**misses**"
        yield f"| {claim.what} | {claim.least:.0%} | {claim.found:.1%} | {claim.num} | {verdict} |"
