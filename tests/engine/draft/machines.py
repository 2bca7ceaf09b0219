"""Texts whose acceptance is known and machines whose costs are, for simulations of the choice of drafts.

Acceptance is given as in reports: of 100 steps, in how many the first draft was accepted, the first two, and so on.
Costs are milliseconds by rows, MTP passes and a DFlash pass.
"""

from dataclasses import dataclass
from itertools import pairwise

MAX_MTP_DEPTH = 8
MAX_DEPTH = 15


@dataclass(frozen=True)
class Machine:
    """What a step costs; the experts that rows read between them grow less than the rows."""

    fixed_ms: float
    """Weights that every step reads, whatever its rows."""
    expert_ms: float
    """One row's routed experts."""
    row_ms: float
    """Computing a row."""
    chained_ms: float
    """One pass of the MTP head."""
    block_ms: float
    """The pass of the DFlash drafter."""
    num_experts: int = 256
    num_routed: int = 8
    jump_ms: float = 0.0
    """More from the ninth row on: another kernel."""

    def ms(self, num_rows: int, num_chained: int = 0, num_blocks: int = 0) -> float:
        read = self.num_experts * (1 - (1 - self.num_routed / self.num_experts) ** num_rows)
        drafting = self.chained_ms * num_chained + (self.block_ms if num_blocks else 0.0)
        jump = self.jump_ms if num_rows > 8 else 0.0
        return self.fixed_ms + self.expert_ms * read / self.num_routed + self.row_ms * num_rows + drafting + jump


MACHINES = {
    "spark": Machine(14.0, 8.0, 0.1, 1.4, 2.4),
    "spark, drafter in bf16": Machine(14.0, 8.0, 0.1, 4.2, 10.3),
    "h200": Machine(2.0, 0.55, 0.03, 0.15, 0.6),
    "h200, another kernel past 8 rows": Machine(2.0, 0.55, 0.03, 0.15, 0.6, jump_ms=0.8),
    "cpu": Machine(0.6, 0.1, 0.35, 0.2, 0.5, num_experts=8, num_routed=2),
    # The pocket model with all of its drafters, one thread: a plane fitted to the CPU time of 700 steps.
    "pocket": Machine(3.7, 0.0, 0.34, 0.5, 4.6),
    "slow rows": Machine(1.0, 0.0, 4.0, 1.0, 1.0),
}


@dataclass(frozen=True)
class Text:
    """How likely the drafts of each drafter are accepted: at each position, given that those before it were."""

    mtp: tuple[float, ...]
    dflash: tuple[float, ...]
    ngram: tuple[float, ...] = ()
    """Empty: the text holds no match."""


def rates(*percent: float) -> tuple[float, ...]:
    """From how often the first n drafts are accepted; the last rate holds from there on."""
    chances = (100.0, *percent)
    return tuple(after / before for before, after in pairwise(chances))


TEXTS = {
    # An MTP head of 2.24 tokens a step with two drafts; a block drafter of 80, 50, 30, 15 percent.
    "prose": Text(rates(78, 46, 22), rates(80, 50, 30, 15, 7)),
    "thinking": Text(rates(66, 35, 15), rates(50, 22, 9, 3)),
    # 2.88 tokens a step with two drafts; 8.5 with twelve.
    "agent turns": Text(rates(96, 92), (0.94,) * 3 + (0.93,) * 12),
    "code": Text(rates(93, 84, 74), (0.9, 0.88, 0.85)),
    "json": Text((0.97, 0.96), (0.95, 0.94), (0.8, 0.85, 0.9)),
    "copying": Text((0.9, 0.88), (0.96, 0.95), (0.99,)),
    "copying, poor drafters": Text((0.5, 0.4), (0.4, 0.3), (0.985,)),
    "random": Text((0.02,), (0.02,), (0.05,)),
    # As measured on the pocket model, at all positions of 16 answers.
    "pocket's json": Text((1.0, 0.98, 0.82, 0.74, 0.69), (1.0, 0.98, 0.97, 0.97, 0.96, 0.96, 0.96, 0.94, 0.92, 0.9)),
    "pocket's thinking": Text((1.0, 0.94, 0.56, 0.45, 0.4), (0.97, 0.94, 0.95, 0.95, 0.95, 0.94, 0.93)),
}


def rate_at(rates_by_position: tuple[float, ...], position: int) -> float:
    return 0.0 if not rates_by_position else rates_by_position[min(position, len(rates_by_position) - 1)]


def tokens_per_step(rates_by_position: tuple[float, ...], depth: int) -> float:
    tokens, chance = 1.0, 1.0
    for position in range(depth):
        chance *= rate_at(rates_by_position, position)
        tokens += chance
    return tokens


def fixed_speeds(text: Text, machine: Machine) -> dict[str, float]:
    """Tokens a millisecond of every fixed choice: a drafter at one depth, in every step."""
    speeds = {"plain": 1 / machine.ms(1)}
    for depth in range(1, MAX_DEPTH + 1):
        if depth <= MAX_MTP_DEPTH:
            speeds[f"mtp {depth}"] = tokens_per_step(text.mtp, depth) / machine.ms(1 + depth, depth)
        speeds[f"dflash {depth}"] = tokens_per_step(text.dflash, depth) / machine.ms(1 + depth, 0, depth)
        if text.ngram:
            speeds[f"ngram {depth}"] = tokens_per_step(text.ngram, depth) / machine.ms(1 + depth)
    return speeds
