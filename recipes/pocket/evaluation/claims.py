"""What the pocket model must reach, each held against what an evaluation found."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recipes.pocket.evaluation.tasks import TaskResult

__all__ = ["Claim", "claims"]

KEY_TOKENS = 4096
_LEAST_KEPT = 0.85
_JSON_AND_CODE = ("invoice", "records", "code")


@dataclass(frozen=True)
class Claim:
    """`found` is a share of `num` answers and must be at least `least`."""

    what: str
    least: float
    found: float
    num: int

    @property
    def holds(self) -> bool:
        return self.found >= self.least


def claims(tasks: Mapping[str, TaskResult]) -> Iterator[Claim]:
    """The claims of which `tasks`, by name, tell something."""
    invoice, key = tasks.get("invoice"), tasks.get(f"key at {KEY_TOKENS:,}")
    if invoice:
        yield Claim("unseen invoices: valid JSON", 0.95, invoice.scores["valid"], invoice.num)
        yield Claim("unseen invoices: right fields", 0.90, invoice.scores["fields"], invoice.num)
    if key:
        yield Claim(f"a key in {KEY_TOKENS:,} tokens found", 0.90, key.scores["exact"], key.num)
    for name in _JSON_AND_CODE:
        kept = tasks[name].kept(0) if name in tasks else None
        if kept is not None:
            yield Claim(f"first of two drafts kept: {name}", _LEAST_KEPT, kept, tasks[name].num)
