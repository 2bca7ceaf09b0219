"""The inputs of a decode step that change from one step to the next."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["StepTensors"]


class StepTensors(NamedTuple):
    """What `next_inputs` replaces in place by the next step's."""

    token_ids: Tensor
    """int64 [R]."""
    positions: Tensor
    """int64 [R]."""
    slot_mapping: Tensor
    """int64 [R]."""
    num_accepted: Tensor
    """int32 [S]: rows of the step before that were accepted."""
    seen: Tensor
    """int32 [S]: tokens that a sequence's last row attends to, this step's included."""
