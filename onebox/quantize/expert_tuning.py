"""Tunes the experts of a block in groups, so that the sum of all of them comes close to what the source gives.

The residual is what the block should give minus what it gives now. The output of a group's branches is added to the
residual, the group is tuned to give the sum, and what it then gives is subtracted: later groups make up for what
earlier ones could not reach.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.quantize.blocks import BlockWeights, is_tuned, tuned_matrix
from onebox.quantize.branches import Branch, ExpertInput, Matrices, branch_sum, row_chunks
from onebox.quantize.row_errors import RowErrors, row_weights
from onebox.quantize.settings import CalibrationSettings
from onebox.quantize.sign_round import MatrixTensors, TunedMatrix, tune

__all__ = ["ErrorSums", "ExpertTuning", "TunedGroup"]


class ErrorSums(NamedTuple):
    """Errors of tokens, summed over what was tuned on and over what was held out."""

    tuned_on: float = 0.0
    held_out: float = 0.0

    def is_less(self, other: "ErrorSums") -> bool:
        """On what was held out, which tuning cannot have learnt by heart; on the rest if nothing was held out."""
        return self.held_out < other.held_out if other.held_out else self.tuned_on < other.tuned_on


@dataclass(frozen=True)
class TunedGroup:
    """The tensors of the tuned matrices by module name, and the errors rounded to nearest and tuned.

    There are no tensors where rounding to nearest has the smaller error.
    """

    tensors: dict[str, MatrixTensors]
    rounded: ErrorSums
    tuned: ErrorSums


@dataclass
class ExpertTuning:
    """The tuning of one block's experts on the input that the build gives them."""

    weights: BlockWeights
    inputs: ExpertInput
    residual: Tensor
    """float32 [rows, hidden], in host memory: what the block should give minus what it gives; changed in place."""
    source: Tensor
    """float32 [rows, hidden], in host memory: what the block should give."""
    errors: RowErrors
    num_tuned_on: int
    """Rows; those behind them are held out."""
    settings: CalibrationSettings
    generator: torch.Generator

    def run(self, branches: Sequence[Branch], on_step: Callable[[], None]) -> TunedGroup:
        """Tunes these branches together, by the input's rows that reach at least one of them."""
        reached: Tensor = torch.cat([branch.rows for branch in branches]).unique()  # type: ignore[no-untyped-call]
        rows, held_out = reached[reached < self.num_tuned_on], reached[reached >= self.num_tuned_on]
        tuned = self._start(branches)
        rounded = self._read(branches, self.weights.built)

        def current() -> list[Matrices]:
            fixed = {
                name: weight
                for branch, held in zip(branches, rounded, strict=True)
                for name, weight in zip(branch.modules, held, strict=True)
            }
            return self._read(branches, lambda name: tuned[name].weight() if name in tuned else fixed[name])

        def losses() -> Iterator[Tensor]:
            on_step()
            yield self._errors(branches, current(), self._batch(rows)).mean()

        tune(list(tuned.values()), losses, self.settings.num_steps)
        with torch.no_grad():
            found = current()
            before, after = (
                ErrorSums(*(self._total(branches, matrices, part) for part in (rows, held_out)))
                for matrices in (rounded, found)
            )
            is_better = after.is_less(before)
            for branch, held in zip(branches, found if is_better else rounded, strict=True):
                self.inputs.add(self.residual, branch, held, -1.0)
        tensors = {name: matrix.tensors() for name, matrix in tuned.items()} if is_better else {}
        return TunedGroup(tensors, before, after)

    def _start(self, branches: Sequence[Branch]) -> dict[str, TunedMatrix]:
        """Adds the branches' output to the residual. Returns their matrices to tune, by module name."""
        tuned = {}
        for branch, matrices in zip(branches, self._read(branches, self.weights.before_tuning), strict=True):
            with torch.no_grad():
                self.inputs.add(self.residual, branch, matrices)
                importances = self._importances(branch.before(self.num_tuned_on), matrices)
            for name, weight, importance in zip(branch.modules, matrices, importances, strict=True):
                choice = self.weights.block.choices[name]
                if is_tuned(choice):
                    tuned[name] = tuned_matrix(choice, weight, importance)
        return tuned

    def _importances(self, branch: Branch, matrices: Matrices) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of squares of what each of the branch's matrices reads, by column, weighted as the errors are."""
        gate, up, _ = matrices
        outer, inner = torch.zeros_like(gate[0]), torch.zeros_like(gate[:, 0])
        for part in row_chunks(len(branch.rows)):
            rows = branch.rows[part]
            x = self.inputs.at(rows)
            weights = (branch.factors[part].square() * row_weights(self.source[rows])).to(x.device)[:, None]
            outer += (weights * x.square()).sum(dim=0)
            inner += (weights * (F.silu(F.linear(x, gate)) * F.linear(x, up)).square()).sum(dim=0)
        return outer, outer, inner

    def _read(self, branches: Sequence[Branch], read: Callable[[str], Tensor]) -> list[Matrices]:
        return [(read(gate), read(up), read(down)) for gate, up, down in (branch.modules for branch in branches)]

    def _batch(self, rows: Tensor) -> Tensor:
        """Some of these rows, ascending."""
        count = min(self.settings.batch_tokens, len(rows))
        return rows[torch.randperm(len(rows), generator=self.generator)[:count]].sort().values

    def _errors(self, branches: Sequence[Branch], matrices: Sequence[Matrices], rows: Tensor) -> Tensor:
        """Errors [n] of the block's output at these rows."""
        place = torch.full((len(self.residual),), -1)
        place[rows] = torch.arange(len(rows))
        parts = []
        for branch in branches:
            at = place[branch.rows]
            parts.append((at[at >= 0], branch.factors[at >= 0]))
        x = self.inputs.at(rows)
        missing = self.residual[rows].to(x.device) - branch_sum(x, parts, matrices)
        return self.errors.of(missing, self.source[rows].to(x.device))

    def _total(self, branches: Sequence[Branch], matrices: Sequence[Matrices], rows: Tensor) -> float:
        return sum(float(self._errors(branches, matrices, rows[part]).sum()) for part in row_chunks(len(rows)))
