"""Calibrates one block: what it gives with the source's weights is what it should give with the build's.

Two streams run through the model: the source's, of the source's weights, and the build's, of weights as the build will
have them. A block is tuned on the build's stream towards the source's, so it also makes up for the blocks before it:
first the projections of its mixer, if the recipe quantises them, then its experts in groups. How a token's error counts
follows from what reads the stream behind the block (`row_errors.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebox.model.reference import DeltaState, KVRows, WeightScope, add_mixer, rotary, text_positions
from onebox.quantize.blocks import BlockWeights, is_tuned, tuned_matrix
from onebox.quantize.branches import ExpertInput
from onebox.quantize.expert_tuning import ErrorSums, ExpertTuning
from onebox.quantize.row_errors import RelativeSquares, RowErrors
from onebox.quantize.settings import CalibrationSettings
from onebox.quantize.sign_round import MatrixTensors, tune
from onebox.spec.model import FULL, ModelSpec

__all__ = ["BlockReport", "BlockTuning", "Streams"]


@dataclass
class Streams:
    """The residual stream of all sequences before a block: float32 [sequences, tokens, hidden], in host memory.

    The last sequences are held out: they run through the model as the others do, and nothing is tuned on them.
    """

    source: Tensor
    built: Tensor


@dataclass
class BlockReport:
    """What was tuned in a block. Errors are means over all tokens of a kind, of the mixer's and the block's output.

    Those of a block whose output is predictions (`PredictionErrors`) are of that alone.
    """

    name: str
    num_tuned: int = 0
    """Matrices."""
    num_rounded: int = 0
    """Matrices of experts that too few tokens reach, which are rounded to nearest."""
    num_not_better: int = 0
    """Matrices that tuning did not improve, which are rounded to nearest."""
    rounded_error: float = 0.0
    tuned_error: float = 0.0
    """Of the tokens that were tuned on, as the one before."""
    held_out_rounded_error: float = 0.0
    held_out_tuned_error: float = 0.0
    fewest_tokens: int | None = None
    """That reach an expert, of those that were tuned on."""

    def add(self, num_matrices: int, num_better: int, rounded: ErrorSums, tuned: ErrorSums) -> None:
        self.num_tuned += num_better
        self.num_not_better += num_matrices - num_better
        self.rounded_error += rounded.tuned_on
        self.tuned_error += tuned.tuned_on
        self.held_out_rounded_error += rounded.held_out
        self.held_out_tuned_error += tuned.held_out

    def divide(self, num_tuned_on: int, num_held_out: int) -> None:
        """Makes means of sums over so many values."""
        self.rounded_error /= num_tuned_on
        self.tuned_error /= num_tuned_on
        self.held_out_rounded_error /= max(1, num_held_out)
        self.held_out_tuned_error /= max(1, num_held_out)


@dataclass
class BlockTuning:
    """The calibration of one block; `on_step` is called once per tuning step."""

    spec: ModelSpec
    weights: BlockWeights
    streams: Streams
    num_tuned_on: int
    """Sequences of the streams; those behind them are held out."""
    settings: CalibrationSettings
    generator: torch.Generator
    errors: RowErrors
    """Of the block's output; the mixer's are relative squares always, because the experts norm what they read."""
    on_step: Callable[[], None]
    tensors: dict[str, MatrixTensors] = field(default_factory=dict)
    """Of the matrices that are better tuned than rounded, by module name."""
    num_steps: int = 0
    """Taken so far."""

    def run(self) -> BlockReport:
        """Tunes the block and takes both streams through it."""
        report = BlockReport(self.weights.block.name)
        dense = self.weights.dense(built=False)
        self._mix(self.streams.source, dense)
        built = self._tune_mixer(report)
        self._mix(self.streams.built, built)
        self._tune_experts(report, dense, built)
        report.divide(*(part[..., 0].numel() for part in self.streams.source.tensor_split([self.num_tuned_on])))
        return report

    def _count_step(self) -> None:
        self.num_steps += 1
        self.on_step()

    # The mixer.

    def _mixed(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """One sequence [tokens, hidden] after the mixer, on the weights' device."""
        device = self.weights.device
        with device:
            memory = (KVRows if self.weights.block.kind == FULL else DeltaState).empty(self.spec)
            rotation = rotary(self.spec, text_positions(0, len(x)))
            return add_mixer(self.spec, WeightScope(weights, self.weights.block.name), x.to(device), memory, rotation)

    def _mix(self, stream: Tensor, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for sequence in stream:
                sequence.copy_(self._mixed(weights, sequence))

    def _tune_mixer(self, report: BlockReport) -> dict[str, Tensor]:
        """The build's weights of everything but routed experts, the mixer's after tuning."""
        dense = self.weights.dense(built=True)
        choices = self.weights.block.mixer_tuned
        if not choices:
            return dense
        tuned = {
            choice.module.plain_tensor: tuned_matrix(choice, dense[choice.module.plain_tensor]) for choice in choices
        }
        rounded = {choice.module.plain_tensor: self.weights.built(choice.module.name) for choice in choices}
        num_sequences = max(1, self.settings.batch_tokens // self.settings.sequence_tokens)
        squares = RelativeSquares()

        def error(weights: dict[str, Tensor], number: int) -> Tensor:
            found = self._mixed({**dense, **weights}, self.streams.built[number])
            wanted = self.streams.source[number].to(found.device)
            return squares.of(wanted - found, wanted)

        def losses() -> Iterator[Tensor]:
            self._count_step()
            for number in torch.randperm(self.num_tuned_on, generator=self.generator)[:num_sequences].tolist():
                yield error({name: matrix.weight() for name, matrix in tuned.items()}, number).mean()

        tune(list(tuned.values()), losses, self.settings.num_steps)
        with torch.no_grad():
            found = {name: matrix.weight() for name, matrix in tuned.items()}
            before, after = (
                ErrorSums(*(sum(float(error(weights, number).sum()) for number in part) for part in self._parts()))
                for weights in (rounded, found)
            )
        is_better = after.is_less(before)
        better = choices if is_better else []
        self.tensors |= {choice.module.name: tuned[choice.module.plain_tensor].tensors() for choice in better}
        of_mixer = (before, after) if isinstance(self.errors, RelativeSquares) else (ErrorSums(), ErrorSums())
        report.add(len(choices), len(better), *of_mixer)
        return {**dense, **(found if is_better else rounded)}

    def _parts(self) -> tuple[range, range]:
        """The numbers of the sequences that are tuned on and of those that are held out."""
        return range(self.num_tuned_on), range(self.num_tuned_on, len(self.streams.built))

    # The experts.

    def _tune_experts(self, report: BlockReport, dense: dict[str, Tensor], built: dict[str, Tensor]) -> None:
        source, stream = (whole.flatten(0, 1) for whole in (self.streams.source, self.streams.built))
        name = self.weights.block.name
        with torch.no_grad():
            self._add_source_experts(source, ExpertInput(self.spec, WeightScope(dense, name), source.clone()))
            inputs = ExpertInput(self.spec, WeightScope(built, name), stream)
            branches = inputs.branches(name)
            residual = source - stream
            wanted = set(self.weights.block.branches_tuned)
            num_rows = self.num_tuned_on * self.streams.source.shape[1]
            counts = {branch.name: len(branch.before(num_rows).rows) for branch in branches}
            few = {name for name, count in counts.items() if count < self.settings.min_tokens} & wanted
            for branch in branches:
                read = self.weights.built if branch.name in few else self.weights.before_tuning
                gate, up, down = (read(module) for module in branch.modules)
                inputs.add(residual, branch, (gate, up, down), -1.0)
        to_tune = [branch for branch in branches if branch.name in wanted - few]
        report.num_rounded = sum(len(self._tuned_modules(branch.modules)) for branch in branches if branch.name in few)
        report.fewest_tokens = min(counts.values())
        tuning = ExpertTuning(
            self.weights, inputs, residual, source, self.errors, num_rows, self.settings, self.generator
        )
        for begin in range(0, len(to_tune), self.settings.experts_at_once):
            group = to_tune[begin : begin + self.settings.experts_at_once]
            done = tuning.run(group, self._count_step)
            self.tensors |= done.tensors
            modules = [module for branch in group for module in branch.modules]
            report.add(len(self._tuned_modules(modules)), len(done.tensors), done.rounded, done.tuned)
        torch.sub(source, residual, out=stream)

    def _add_source_experts(self, out: Tensor, inputs: ExpertInput) -> None:
        """Adds the output of all of the source's experts to `out`."""
        for branch in inputs.branches(self.weights.block.name):
            gate, up, down = (self.weights.source(module) for module in branch.modules)
            inputs.add(out, branch, (gate, up, down))

    def _tuned_modules(self, names: list[str]) -> list[str]:
        return [name for name in names if is_tuned(self.weights.block.choices[name])]
