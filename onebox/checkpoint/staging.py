"""Loads tensors to a device through a bounded staging buffer, reading ahead in the order of the expected requests.

    file  --direct read-->  piece of the buffer  --copy-->  tensor on the device

Memory use is the tensors returned so far, the buffer (`pieces.py`: 128 MiB), and tensors of a group or piece that were
read but not yet requested. Handles entries and bytes, neither modules nor formats.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.pieces import PIECE_BYTES, FilePiece, PieceRing, plan_pieces
from onebox.checkpoint.tensors import torch_dtype
from onebox.spec.errors import MismatchError, UnreadableError

__all__ = ["Ledger", "Read", "StagedReader", "TensorReader", "place_of"]

# Sizes that only the host reads; on a device each read would synchronise.
_HOST_SUFFIX = ".weight_shape"

Read = Callable[[TensorEntry], Tensor]
"""Reads one tensor into its own memory, with the shape and dtype of its entry."""


def place_of(entry: TensorEntry, device: torch.device) -> torch.device:
    """The device of a tensor of a model on `device`: the CPU for a `weight_shape` and what is converted there."""
    return torch.device("cpu") if entry.on_host or entry.name.endswith(_HOST_SUFFIX) else device


class TensorReader(Protocol):
    """Returns each of its tensors once. Exiting the context without an error checks that all were read."""

    def read(self, entry: TensorEntry) -> Tensor: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Ledger:
    """Records which tensors have been requested: each must be requested exactly once."""

    def __init__(self, order: Iterable[TensorEntry]) -> None:
        self._is_left: dict[str, bool] = {}
        for entry in order:
            if entry.name in self._is_left:
                raise MismatchError(f"{entry.name} is needed by two parts of the model: each tensor is bound once.")
            self._is_left[entry.name] = True

    def strike(self, entry: TensorEntry) -> None:
        """Records that `entry` was requested."""
        if entry.name not in self._is_left:
            raise MismatchError(f"{entry.name} was asked for and is not in the order of loading.")
        if not self._is_left[entry.name]:
            raise MismatchError(f"{entry.name} was asked for a second time: each tensor is bound once.")
        self._is_left[entry.name] = False

    def close(self) -> None:
        """Raises `MismatchError` if a tensor was not requested."""
        left = [name for name, is_left in self._is_left.items() if is_left]
        if left:
            more = f" ({len(left) - 1} more like it)" if len(left) > 1 else ""
            raise MismatchError(f"{left[0]} was taken by no part of the model{more}: each tensor is bound once.")


class StagedReader:
    """Reads tensors to `device`, each once, fastest in the order of `groups`: tensors of a group are read together."""

    def __init__(
        self, groups: Sequence[Sequence[TensorEntry]], device: torch.device, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._ledger = Ledger(entry for group in groups for entry in group)
        self._device = device
        self._targets: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        self._ring = PieceRing(plan_pieces(groups, piece_bytes), device, piece_bytes)

    def read(self, entry: TensorEntry) -> Tensor:
        """The tensor, in its own memory; a `weight_shape` stays on the host."""
        self._ledger.strike(entry)
        if not entry.nbytes:
            return self._empty(entry).view(torch_dtype(entry.dtype)).reshape(entry.shape)
        while entry.name not in self._arrived:
            if not self._ring.take(self._copy):
                raise UnreadableError(f"{entry.name} was lost with an earlier read that failed: load again.")
        return self._arrived.pop(entry.name)

    def _copy(self, piece: FilePiece, staged: Tensor) -> None:
        """Copies each stretch of a piece to its position in its tensor."""
        for stretch in piece.stretches:
            entry, begin = stretch.entry, stretch.begin - piece.begin
            part = staged[begin : begin + stretch.nbytes]
            target = self._targets[entry.name] if stretch.offset else self._empty(entry)
            _copy_bytes(part, target[stretch.offset : stretch.offset + stretch.nbytes])
            if not stretch.is_last:
                self._targets[entry.name] = target
                continue
            self._targets.pop(entry.name, None)
            self._arrived[entry.name] = target.view(torch_dtype(entry.dtype)).reshape(entry.shape)

    def _empty(self, entry: TensorEntry) -> Tensor:
        return torch.empty(entry.nbytes, dtype=torch.uint8, device=place_of(entry, self._device))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ring.close()
        if error is None:
            self._ledger.close()


def _copy_bytes(source: Tensor, target: Tensor) -> None:
    """Queues the copy to a GPU; a copy to CPU memory is done by this thread.

    torch would split each copy over its threads and wait for the slowest, which takes many times as long on a busy
    machine.
    """
    if target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
