"""The few shapes that decode steps are rounded up to: each is captured once, before the engine is ready.

A shape is a number of rows, a number of sequences and a width of the page table; what lies beyond a step's own rows and
sequences is blank and costs little: no expert is read for it. Together with the depth of drafting that makes 32
forward graphs and 64 sampling graphs for eight sequences with four drafts. One sequence alone gets the exact number of
rows up to nine, because its speed is what a single user sees. A block drafter's pass has graphs of its own, by the
number of sequences, the depth and the width of the page table: they do not multiply the others.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from onebox.engine.config import EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.inputs import StepSizes
from onebox.spec.kv import PAGE_TOKENS

__all__ = ["MAX_STEP_ROWS", "StepShapes"]

MAX_STEP_ROWS = 128
"""Rows that the decode kernels take at once; a larger step is computed in groups, with the same bits."""
_ROWS = (4, 8, 12, 16, 24, 32, 48, 64, 96, MAX_STEP_ROWS)
"""Rows of several sequences. The kernels' own classes end at 4, 8, 16, 32, 64, 96 and 128; blank rows within one cost
little: linears compute them with the others, and no expert is read for them."""
_ROWS_ALONE = (*range(1, 10), 11, 13, 16)
"""Rows of one sequence."""
_BLOCK_DEPTHS = (3, 7)
"""Drafts of a block beside the most, where the depth is chosen in every step."""
_SEQUENCES_FACTOR = 4
"""From one number of sequences to the next."""
_NARROW_PAGES = 128
"""Columns of the narrow page table: 8,192 tokens, 64 pieces of attention. The wide one holds the longest context."""


@dataclass(frozen=True)
class StepShapes:
    """The shapes of one engine's decode steps."""

    max_num_seqs: int
    rows_per_sequence: int
    num_pages: int
    """Columns of the page table that reaches the longest context's last draft."""
    depths: tuple[int, ...]
    """How many tokens the MTP head drafts, ascending."""
    block_depths: tuple[int, ...] = ()
    """How many tokens the block drafter drafts, ascending; none without one."""

    @classmethod
    def of(cls, config: EngineConfig) -> "StepShapes":
        speculation = config.speculation
        if not speculation.with_mtp:
            depths: tuple[int, ...] = (0,)
        elif speculation.method is SpeculationMethod.MTP:
            # Near its end a sequence needs fewer drafts; those beyond are made and not used, here and below.
            depths = (speculation.max_drafts,)
        else:
            fewer = (depth for depth in (0, 1, 2, 4) if depth < speculation.max_mtp_drafts)
            depths = (*fewer, speculation.max_mtp_drafts)
        num_pages = (config.max_model_len + config.rows_per_sequence) // PAGE_TOKENS + 1
        return cls(config.max_num_seqs, config.rows_per_sequence, num_pages, depths, _block_depths(speculation))

    @property
    def width(self) -> int:
        """Drafts of a sequence, at most."""
        return max(*self.depths, *self.block_depths, 0)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Columns of the page table, ascending."""
        return (*((_NARROW_PAGES,) if self.num_pages > _NARROW_PAGES else ()), self.num_pages)

    @cached_property
    def rows(self) -> dict[int, tuple[int, ...]]:
        """By number of sequences, ascending: the numbers of rows of steps of up to so many sequences, ascending."""
        found: dict[int, tuple[int, ...]] = {}
        previous, count = 0, 1
        while previous < min(self.max_num_seqs, MAX_STEP_ROWS):
            count = min(count, self.max_num_seqs, MAX_STEP_ROWS)
            found[count] = self._rows_between(previous + 1, min(count * self.rows_per_sequence, MAX_STEP_ROWS))
            previous, count = count, _SEQUENCES_FACTOR * count
        return found

    def _rows_between(self, least: int, most: int) -> tuple[int, ...]:
        if least == 1:
            return (*(rows for rows in _ROWS_ALONE if rows < most), most)
        return _ROWS[bisect_left(_ROWS, least) : bisect_left(_ROWS, most) + 1]

    @property
    def largest(self) -> StepSizes:
        """The most of everything."""
        num_sequences = max(self.rows)
        return StepSizes(self.rows[num_sequences][-1], num_sequences, self.num_pages)

    def fit(self, exact: StepSizes) -> StepSizes | None:
        """The smallest shape that holds a step of these sizes, if there is one."""
        num_sequences = _at_least(tuple(self.rows), exact.num_sequences)
        num_rows = _at_least(self.rows[num_sequences], exact.num_rows) if num_sequences else None
        num_pages = _at_least(self.widths, exact.num_pages)
        if num_sequences is None or num_rows is None or num_pages is None:
            return None
        return StepSizes(num_rows, num_sequences, num_pages)

    def fit_depth(self, depth: int) -> int | None:
        """The smallest depth of a sampling graph that drafts so many tokens, if there is one."""
        return _at_least(self.depths, depth)

    def fit_block(self, count: int, depth: int) -> tuple[int, int] | None:
        """The smallest (number of sequences, depth) of a captured pass of the block drafter, if there is one."""
        fitting, deep = _at_least(tuple(self.rows), count), _at_least(self.block_depths, depth)
        return None if fitting is None or deep is None else (fitting, deep)


def _block_depths(speculation: SpeculationConfig) -> tuple[int, ...]:
    if not speculation.with_dflash:
        return ()
    most = speculation.max_block_drafts
    is_fixed = speculation.method is SpeculationMethod.DFLASH
    return (most,) if is_fixed else (*(depth for depth in _BLOCK_DEPTHS if depth < most), most)


def _at_least(ascending: tuple[int, ...], value: int) -> int | None:
    place = bisect_left(ascending, value)
    return ascending[place] if place < len(ascending) else None
