"""The block drafter of a starting engine: which one was asked for, what it takes, and how many drafts it makes."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onebox.engine.config import MAX_DRAFTS, SpeculationMethod
from onebox.planner.memory import DEFAULT_DRAFTS
from onebox.spec.dflash import DFlashSpec
from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from onebox.engine.plan import EngineOptions
    from onebox.model.load import LoadFormat

__all__ = ["DrafterPlan", "check_block_drafts", "default_drafts", "plan_drafter"]

_USES = (SpeculationMethod.DFLASH, SpeculationMethod.AUTO)


class DrafterPlan(NamedTuple):
    """A block drafter beside the model."""

    directory: Path
    spec: DFlashSpec
    num_bytes: int
    """Of its weights on the device."""


def plan_drafter(
    options: "EngineOptions",
    target: ModelSpec,
    device: "torch.device",
    dtype: "torch.dtype",
    load_format: "LoadFormat",
) -> DrafterPlan | None:
    """The drafter that is asked for, if any; refused if nothing would use it, or if it was made for another model."""
    if options.draft_model is None:
        if options.speculation == SpeculationMethod.DFLASH:
            raise UsageError('Speculation by dflash needs a drafter: give its directory as "model".')
        return None
    if options.speculation not in _USES:
        raise UsageError(
            f"The drafter {options.draft_model} has nothing to act on with speculation by {options.speculation}: "
            'give the method "dflash", or "auto" to choose a drafter in every step.'
        )
    directory = Path(options.draft_model)
    if not directory.is_dir():
        raise UsageError(f"The drafter {directory} is not a directory on this machine; pull it first.")
    from onebox.model.drafter import drafter_footprint

    return DrafterPlan(directory, *drafter_footprint(directory, target, device, dtype, load_format))


def default_drafts(drafter: DrafterPlan | None) -> int:
    """Drafts of a step, at most, where nobody says how many."""
    return min(drafter.spec.max_drafts, MAX_DRAFTS) if drafter else DEFAULT_DRAFTS


def check_block_drafts(drafter: DrafterPlan, drafts: int) -> int:
    """The rows of the drafter's blocks, into which so many drafts must fit."""
    spec = drafter.spec
    if drafts > spec.max_drafts:
        raise UsageError(
            f"The drafter's blocks of {spec.block_size} rows hold {spec.max_drafts} drafts, not {drafts}; give "
            f"num_speculative_tokens {spec.max_drafts} or less."
        )
    return spec.block_size
