"""Inspects a DFlash drafter: its shape, formats and bytes, whether it fits a model, and all problems.

Reads headers only, without torch; `deep` also reads the values.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onebox.checkpoint.bind import Binding, Problem, ProblemKind
from onebox.checkpoint.drafter import bind_drafter, open_drafter
from onebox.spec.block_drafter import BlockDrafter, is_context_projection
from onebox.spec.dflash import DFlashSpec, refuse_other_target
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec

__all__ = ["DrafterReport", "inspect_drafter"]


@dataclass(frozen=True)
class DrafterReport:
    """Everything that `onebox inspect` reports on a drafter."""

    directory: Path
    spec: DFlashSpec
    formats: dict[str, int]
    """Modules by format."""
    num_tensors: int
    loaded: BlockDrafter
    problems: tuple[Problem, ...]
    is_deep: bool

    @property
    def is_servable(self) -> bool:
        return not any(problem.is_fatal for problem in self.problems)


def inspect_drafter(
    directory: Path,
    target: ModelSpec | None = None,
    *,
    deep: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> DrafterReport:
    """Opens and binds the drafter in `directory`; with a `target`, that it was made for another model is a problem."""
    checkpoint = open_drafter(directory)
    binding = bind_drafter(checkpoint)
    if target is not None:
        try:
            refuse_other_target(checkpoint.spec, target)
        except MismatchError as error:
            binding.problems.append(Problem(ProblemKind.CONFIG, "config.json", str(error)))
    if deep:
        from onebox.checkpoint.values import check_values  # imports torch, which headers do not need

        binding.problems += check_values(binding, on_bytes)
    return DrafterReport(
        directory=directory,
        spec=checkpoint.spec,
        formats=dict(Counter(str(bound.stored) for bound in binding.modules.values())),
        num_tensors=len(checkpoint.tensors),
        loaded=_loaded(checkpoint.spec, binding),
        problems=tuple(sorted(binding.problems, key=lambda problem: not problem.is_fatal)),
        is_deep=deep,
    )


def _loaded(spec: DFlashSpec, binding: Binding) -> BlockDrafter:
    bounds = binding.modules.values()
    context = sum(bound.loaded_bytes for bound in bounds if is_context_projection(bound.module))
    names = sorted({bound.stored.format.value for bound in bounds if bound.module.is_matrix})
    return BlockDrafter(spec, "/".join(names), sum(bound.loaded_bytes for bound in bounds), context)
