"""Reads tensors with the fastsafetensors package, which loads a whole shard to the device at a time.

The package is optional. Memory use is the tensors returned so far plus the shards with tensors still to be read: one
shard if the files follow the model's order.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import Checkpoint
from onebox.checkpoint.staging import Ledger, place_of
from onebox.checkpoint.tensors import torch_dtype
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["FastReader"]


class FastReader:
    """Reads the tensors of `groups` to `device`, each once; a shard is open from first to last use."""

    def __init__(self, checkpoint: Checkpoint, groups: Sequence[Sequence[TensorEntry]], device: torch.device) -> None:
        self._open_shard = _library().fastsafe_open
        entries = [entry for group in groups for entry in group]
        self._ledger = Ledger(entries)
        self._device = device
        self._num_left = Counter(entry.path for entry in entries)
        self._shards: dict[Path, Any] = {}
        self._in_file: dict[Path, list[TensorEntry]] = {}
        for entry in sorted(checkpoint.tensors.values(), key=lambda entry: entry.begin):
            self._in_file.setdefault(entry.path, []).append(entry)

    def read(self, entry: TensorEntry) -> Tensor:
        """The tensor, in its own memory; a `weight_shape` stays on the host."""
        self._ledger.strike(entry)
        whole, offset = self._find(entry)
        stored: Tensor = self._shard(entry.path).get_tensor(whole.name).reshape(-1).view(torch.uint8)
        # A view would keep the whole shard allocated.
        own = stored[offset : offset + entry.nbytes].clone().to(place_of(entry, self._device))
        self._num_left[entry.path] -= 1
        if not self._num_left[entry.path]:
            self._close_shard(entry.path)
        return own.view(torch_dtype(entry.dtype)).reshape(entry.shape)

    def _find(self, entry: TensorEntry) -> tuple[TensorEntry, int]:
        """The stored tensor that contains `entry`, and the offset: an expert may be a slice of a fused tensor."""
        held = self._in_file[entry.path]
        whole = held[bisect_right(held, entry.begin, key=lambda other: other.begin) - 1]
        return whole, entry.begin - whole.begin

    def _shard(self, path: Path) -> Any:
        if path not in self._shards:
            try:
                # GPUDirect Storage needs a separate driver; without it the package reads through pinned memory.
                self._shards[path] = self._open_shard(str(path), device=str(self._device), nogds=True)
            except Exception as error:
                raise UnreadableError(f"{path} could not be read by fastsafetensors: {error}.") from None
        return self._shards[path]

    def _close_shard(self, path: Path) -> None:
        self._shards.pop(path).__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in list(self._shards):
            self._close_shard(path)
        if error is None:
            self._ledger.close()


def _library() -> Any:
    try:
        import fastsafetensors
    except ImportError:
        raise UsageError(
            "The load format fastsafetensors needs a package that is not installed: `pip install fastsafetensors`, "
            "or load with safetensors."
        ) from None
    return fastsafetensors
