"""An evaluation as Markdown tables and as JSON, and the requirements that the pocket model must meet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipes.pocket.evaluation.predictions import PredictionScores
from recipes.pocket.evaluation.tasks import TaskResult

__all__ = ["BuildResult", "Claim", "PocketEvaluation", "claims"]

_KEYS = ("key at 4,096", "key at 30,000")
_OTHERS = {
    "invoice, ordinary names": ("invoices with ordinary names: exact", "exact", 0.95),
    "picture: invoice picture": ("pictures of invoices, unseen fonts: right fields", "fields", 0.90),
    "picture: line": ("pictures of lines, unseen fonts: right characters", "characters", 0.95),
}
"""By task: what is required, of which score, and how much."""
_MIN_ACCEPTANCE = 0.85
_JSON_AND_CODE = ("invoice", "records", "code")
_ACCEPTANCE = "1st draft accepted | 2nd draft accepted after it"


@dataclass(frozen=True)
class Claim:
    """A requirement: `found`, a share of `num` answers, must be at least `least`."""

    what: str
    least: float
    found: float
    num: int

    @property
    def holds(self) -> bool:
        return self.found >= self.least


def claims(tasks: Mapping[str, TaskResult]) -> Iterator[Claim]:
    """The requirements that `tasks`, by name, have results for."""
    invoice = tasks.get("invoice")
    if invoice:
        yield Claim("unseen invoices: valid JSON", 0.95, invoice.scores["valid"], invoice.num)
        yield Claim("unseen invoices: right fields", 0.90, invoice.scores["fields"], invoice.num)
    for task in tasks.values():
        if task.name in _KEYS:
            yield Claim(f"a {task.name.replace(' at ', ' in ')} tokens found", 0.90, task.scores["exact"], task.num)
    for name, (what, score, least) in _OTHERS.items():
        if name in tasks:
            yield Claim(what, least, tasks[name].scores[score], tasks[name].num)
    for name in _JSON_AND_CODE:
        accepted = tasks[name].acceptance(0) if name in tasks else None
        if accepted is not None:
            yield Claim(f"first of two drafts accepted: {name}", _MIN_ACCEPTANCE, accepted, tasks[name].num)


@dataclass(frozen=True)
class BuildResult:
    """A build: the bytes of its tensors and its answers to a few examples, with drafts of its own MTP head."""

    name: str
    num_bytes: int
    tasks: list[TaskResult]


@dataclass(frozen=True)
class PocketEvaluation:
    """All results of one checkpoint, and the environment in `where`."""

    where: dict[str, str]
    tasks: list[TaskResult]
    served: list[TaskResult]
    """Answers of the build that `onebox serve` runs."""
    continuations: list[TaskResult]
    """Continuations of held-out texts."""
    held_out: PredictionScores
    """The master's predictions of held-out texts and right answers."""
    builds: list[BuildResult]
    agreements: dict[str, PredictionScores]
    """By "build / KV format"; the first is the checkpoint itself with the first KV format."""
    kv_bytes: dict[str, int]
    """Bytes per token in the cache, by KV format."""

    @property
    def claims(self) -> list[Claim]:
        return list(claims({task.name: task for task in self.tasks}))

    def as_markdown(self) -> str:
        sections = {
            "Answers of the master": _task_table(self.tasks),
            "Answers of the served build": _task_table(self.served),
            "Held-out text": _text_table(self.continuations, self.held_out),
            "Right answers": _answer_table(self._answers, self.held_out),
            "Builds": _build_table(self.builds),
            "Builds and KV formats": self._agreement_table(),
            "Requirements": _claim_table(self.claims),
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
    def _first(self) -> PredictionScores:
        return next(iter(self.agreements.values()))

    @property
    def _answers(self) -> list[str]:
        texts = {task.name for task in self.continuations}
        return [name for name in self.held_out.counts if name not in texts]

    def _agreement_table(self) -> Iterator[str]:
        passages, tokens = self._first.num_passages, self._first.num_tokens
        yield f"Over {tokens:,} predicted tokens of {passages} passages, each in one prefill."
        yield ""
        yield "| build / KV cache | bytes per token | perplexity | mean KL to the first | same most likely token |"
        yield "|---|---|---|---|---|"
        for name, each in self.agreements.items():
            kv_bytes = self.kv_bytes[name.rpartition(" / ")[2]]
            numbers = f"{each.perplexity:.3f} | {each.mean_divergence:.5f} | {each.top_agreement:.2%}"
            yield f"| {name} | {kv_bytes:,} | {numbers} |"


def _agreement(each: PredictionScores) -> Mapping[str, Any]:
    return {
        "perplexity": each.perplexity,
        "mean_kl": each.mean_divergence,
        "top_agreement": each.top_agreement,
        "perplexities": each.perplexities,
        "tokens": each.counts,
    }


def _task_table(tasks: Sequence[TaskResult]) -> Iterator[str]:
    yield f"| task | answers | prompt tokens | scores | {_ACCEPTANCE} |"
    yield "|---|---|---|---|---|---|"
    for task in tasks:
        prompt_tokens = f"{task.mean_prompt_tokens:.0f}"
        yield f"| {task.name} | {task.num} | {prompt_tokens} | {task.scores_text} | {task.acceptance_text} |"


def _text_table(continuations: Sequence[TaskResult], held_out: PredictionScores) -> Iterator[str]:
    yield f"| text | perplexity | tokens | continuations | {_ACCEPTANCE} |"
    yield "|---|---|---|---|---|---|"
    for task in continuations:
        perplexity, tokens = held_out.perplexities[task.name], held_out.counts[task.name]
        yield f"| {task.name} | {perplexity:.2f} | {tokens:,} | {task.num} | {task.acceptance_text} |"


def _answer_table(names: Sequence[str], held_out: PredictionScores) -> Iterator[str]:
    yield "| workload | perplexity of the right answer | tokens |"
    yield "|---|---|---|"
    for name in names:
        yield f"| {name} | {held_out.perplexities[name]:.3f} | {held_out.counts[name]:,} |"


def _build_table(builds: Sequence[BuildResult]) -> Iterator[str]:
    yield f"| build | MB | task | answers | scores | {_ACCEPTANCE} |"
    yield "|---|---|---|---|---|---|---|"
    for each in builds:
        for number, task in enumerate(each.tasks):
            name, size = (each.name, f"{each.num_bytes / 1e6:.1f}") if number == 0 else ("", "")
            yield f"| {name} | {size} | {task.name} | {task.num} | {task.scores_text} | {task.acceptance_text} |"


def _claim_table(found: Sequence[Claim]) -> Iterator[str]:
    yield "| requirement | at least | found | of | |"
    yield "|---|---|---|---|---|"
    for claim in found:
        verdict = "holds" if claim.holds else "**misses**"
        yield f"| {claim.what} | {claim.least:.0%} | {claim.found:.1%} | {claim.num} | {verdict} |"
