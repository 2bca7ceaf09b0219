"""What the model computes in one pass: rows of several sequences and where each sequence's memory lies."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from onebox.kernels.attention.reference import MAX_ROWS
from onebox.spec.errors import MismatchError

__all__ = ["Batch", "ImageRows"]


class ImageRows(NamedTuple):
    """Rows, int64 [m], whose embeddings [m, H] are the vision tower's instead of their tokens'."""

    rows: Tensor
    embeddings: Tensor


@dataclass(frozen=True)
class Batch:
    """R rows in S segments, for `Qwen35.decode` or `Qwen35.prefill`. Integer tensors are on the model's device.

    Segment s has the rows cu_rows[s] .. cu_rows[s + 1] - 1. In decode every sequence has one segment, and its rows'
    tokens stay pending until the next step's `num_accepted`. In prefill a segment is a chunk of a prompt.
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
    """int32 [1]: rows from this number on belong to no sequence; None where every row belongs to one."""
    max_rows: int = MAX_ROWS
    """Rows of one sequence in a decode step, at most."""
    saves: Tensor | None = None
    """int32 [R], prefill only: the pool row in which the DeltaNet state after a row is saved; -1: not saved."""
    image_rows: ImageRows | None = None

    @property
    def required_saves(self) -> Tensor:
        """`saves` of a prefill batch."""
        if self.saves is None:
            raise MismatchError("A batch for prefill needs `saves`: which states are saved.")
        return self.saves
