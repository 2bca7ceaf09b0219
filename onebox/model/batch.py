"""What the model computes in one pass: rows of several sequences and where each sequence's memory lies."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from onebox.kernels.attention.reference import MAX_ROWS

__all__ = ["Batch", "ImageRows", "Stage"]


@dataclass(frozen=True)
class Stage:
    """Consecutive segments of a prefill batch whose DeltaNet states are computed together, before the next stage's.

    A prompt whose state is saved at several positions is split into several segments, one per stage. After the stage
    the states in the slots `copy_from` are copied into the slots `copy_to`.
    """

    first_row: int
    end_row: int
    cu_rows: Tensor
    """int32 [n + 1], from 0: the rows of the stage's n segments."""
    slots: Tensor
    """int32 [n]."""
    copy_from: Tensor
    """int64 [m]."""
    copy_to: Tensor
    """int64 [m]."""


class ImageRows(NamedTuple):
    """Rows, int64 [m], whose embeddings [m, H] are the vision tower's instead of their tokens'."""

    rows: Tensor
    embeddings: Tensor


@dataclass(frozen=True)
class Batch:
    """R rows in S segments, for `Qwen35.decode` or `Qwen35.prefill`. Integer tensors are on the model's device.

    Segment s has the rows cu_rows[s] .. cu_rows[s + 1] - 1. In decode every sequence has one segment, and its rows'
    tokens stay pending until the next step's `num_accepted`. Prefill takes its DeltaNet slots from `stages`.
    """

    token_ids: Tensor
    """int64 [R]."""
    positions: Tensor
    """int64 [3, R]: time, height, width."""
    cu_rows: Tensor
    """int32 [S + 1]."""
    slots: Tensor
    """int32 [S]: each sequence's slot in the DeltaNet pools."""
    num_accepted: Tensor
    """int32 [S]: how many pending tokens of the previous step were accepted; decode only."""
    seen: Tensor
    """int32 [S]: tokens that the segment's last row attends to, itself included."""
    page_table: Tensor
    """int32 [S, pages]."""
    slot_mapping: Tensor
    """int64 [R]: where each row's keys and values are written."""
    num_rows: Tensor | None = None
    """int32 [1], decode only: rows from this number on belong to no sequence; None where every row belongs to one."""
    max_rows: int = MAX_ROWS
    """Rows of one sequence in a decode step, at most."""
    stages: tuple[Stage, ...] = ()
    """Prefill only."""
    image_rows: ImageRows | None = None
