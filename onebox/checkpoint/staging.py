"""Tensors from files to a device through one bounded staging buffer, read ahead in the order they will be asked for.

    file  --direct read-->  piece of the buffer  --copy-->  tensor on the device

Beyond the tensors that were handed out there are the buffer (`pieces.py`: 128 MiB) and what of a group, or of a piece,
has come before it is asked for. Knows entries and bytes, neither modules nor formats.
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

# Sizes that only the host looks at; on a device each look would wait for it.
_HOST_SUFFIX = ".weight_shape"

Read = Callable[[TensorEntry], Tensor]
"""Brings one tensor into memory of its own, with the shape and dtype of its entry."""


def place_of(entry: TensorEntry, device: torch.device) -> torch.device:
    """Where a tensor of a model on `device` belongs."""
    return torch.device("cpu") if entry.name.endswith(_HOST_SUFFIX) else device


class TensorReader(Protocol):
    """Gives each tensor of its order once. Leaving it without an error makes sure that none was left over."""

    def read(self, entry: TensorEntry) -> Tensor: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Ledger:
    """Which tensors of an order were not asked for yet: each may be asked for once."""

    def __init__(self, order: Iterable[TensorEntry]) -> None:
        self._is_left: dict[str, bool] = {}
        for entry in order:
            if entry.name in self._is_left:
                raise MismatchError(f"{entry.name} is wanted by two parts of the model: each tensor is bound once.")
            self._is_left[entry.name] = True

    def strike(self, entry: TensorEntry) -> None:
        """Notes that `entry` was asked for."""
        if entry.name not in self._is_left:
            raise MismatchError(f"{entry.name} was asked for and is not in the order of loading.")
        if not self._is_left[entry.name]:
            raise MismatchError(f"{entry.name} was asked for a second time: each tensor is bound once.")
        self._is_left[entry.name] = False

    def close(self) -> None:
        """Refuses tensors that nobody asked for."""
        left = [name for name, is_left in self._is_left.items() if is_left]
        if left:
            more = f" ({len(left) - 1} more like it)" if len(left) > 1 else ""
            raise MismatchError(f"{left[0]} was taken by no part of the model{more}: each tensor is bound once.")


class StagedReader:
    """Gives tensors on `device`, each once, quickest in the order of `groups`: tensors of a group are read together."""

    def __init__(
        self, groups: Sequence[Sequence[TensorEntry]], device: torch.device, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._ledger = Ledger(entry for group in groups for entry in group)
        self._device = device
        self._targets: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        self._ring = PieceRing(plan_pieces(groups, piece_bytes), device, piece_bytes)

    def read(self, entry: TensorEntry) -> Tensor:
        """The tensor, in memory of its own; the sizes in a `weight_shape` stay with the host."""
        self._ledger.strike(entry)
        if not entry.nbytes:
            return self._empty(entry).view(torch_dtype(entry.dtype)).reshape(entry.shape)
        while entry.name not in self._arrived:
            if not self._ring.take(self._copy):
                raise UnreadableError(f"{entry.name} was lost with a read that failed before: load again.")
        return self._arrived.pop(entry.name)

    def _copy(self, piece: FilePiece, staged: Tensor) -> None:
        """Brings each stretch of a piece to its place in its tensor."""
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
    """Queues the copy to a GPU; to a CPU it is done by this thread.

    torch would share each copy among its threads and wait for the slowest, which takes many times as long on a machine
    that has other work to do.
    """
    if target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
