"""What one step computes: a Batch, complete and frozen when built, and its StepOutput, row for row."""

from dataclasses import dataclass
from typing import Protocol

from onebox.engine.request import SamplingParams

__all__ = ["Batch", "Row", "Runner", "StepOutput"]


@dataclass(frozen=True)
class Row:
    """The tokens that one sequence feeds into its slot this step: a piece of its prompt, or its latest token."""

    request_id: str
    slot: int
    token_ids: tuple[int, ...]
    start: int
    """Tokens that the slot holds already; 0 begins it anew."""
    sampling: SamplingParams | None
    """None in the middle of a prompt, where no token is drawn yet."""

    @property
    def end(self) -> int:
        """The position of the token that is drawn after these."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class StepOutput:
    """For each row of the batch the tokens it keeps (none where none is drawn), or the exception that ended it."""

    results: tuple[tuple[int, ...] | Exception, ...]


class Runner(Protocol):
    """Owns the model and the slots' memory; used by the engine thread alone."""

    @property
    def vocab_size(self) -> int: ...

    def run(self, batch: Batch) -> StepOutput: ...

    def release(self, slot: int) -> None:
        """Forgets what the slot holds."""
