"""Converts weights while they are loaded: each is read, rounded and dropped slab by slab.

    reader --slab in host memory--> pool of threads: codes, scales --> new tensor on the device

The new tensors are bit for bit those that `onebox build` writes, because the same code makes them in the same place, on
the CPU. (A GPU divides by a constant as it multiplies by its reciprocal, which rounds otherwise.) Slabs are read ahead
in the order of loading, a few per thread.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from onebox.checkpoint.bind import Bound
from onebox.checkpoint.conversion import ConvertedModule, ConvertedTensors
from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.recipe import rounded_tensors
from onebox.checkpoint.rounding import round_slab, slabs
from onebox.checkpoint.staging import Read
from onebox.checkpoint.tensors import torch_dtype
from onebox.spec.errors import MismatchError, OneboxError
from onebox.spec.weights import Stored

__all__ = ["Converter", "converted_order", "shape_tensor"]

_MAX_THREADS = 8
_SLABS_PER_THREAD = 2
_SHAPE_SUFFIX = "weight_shape"


def converted_order(groups: Iterable[Sequence[TensorEntry]], converted: ConvertedTensors) -> list[list[TensorEntry]]:
    """The order of loading with the stored slabs of converted modules in the place of their new tensors.

    Slabs go to host memory. Those of a module are a group of their own: few modules are in memory in both forms.
    """
    order: list[list[TensorEntry]] = []
    seen: set[str] = set()
    for group in groups:
        kept = [entry for entry in group if entry.name not in converted]
        if kept:
            order.append(kept)
        for module in (converted[entry.name] for entry in group if entry.name in converted):
            if module.name not in seen:
                seen.add(module.name)
                order.append([_stored_entry(slab) for slab in slabs(module.source)])
    return order


def _stored_entry(slab: Bound) -> TensorEntry:
    return replace(slab.tensors["weight"], on_host=True)


def shape_tensor(module: ConvertedModule) -> Tensor:
    """What a build writes as `weight_shape`."""
    return torch.tensor(module.source.module.shape, dtype=torch.int64)


class _GrowingModule:
    """The new tensors of a module, filled from their first row on."""

    def __init__(self, module: ConvertedModule, device: torch.device) -> None:
        declared = rounded_tensors(module.target, *module.source.module.shape)
        if declared.pop(_SHAPE_SUFFIX, None):
            self._shape = {f"{module.name}.{_SHAPE_SUFFIX}": shape_tensor(module)}
        else:
            self._shape = {}
        self._whole = {
            f"{module.name}.{suffix}": torch.empty(stored.shape, dtype=torch_dtype(stored.dtype), device=device)
            for suffix, stored in declared.items()
        }
        self._num_filled = [0] * len(self._whole)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self._whole, **self._shape}

    @property
    def is_complete(self) -> bool:
        return self._num_filled == [len(tensor) for tensor in self._whole.values()]

    def add(self, rounded: tuple[Tensor, Tensor]) -> None:
        """Adds the codes and scales of the next slab."""
        for index, (tensor, part) in enumerate(zip(self._whole.values(), rounded, strict=True)):
            begin = self._num_filled[index]
            tensor[begin : begin + len(part)].copy_(part)
            self._num_filled[index] += len(part)


class _Slab(NamedTuple):
    """Rows of a module that are being rounded to codes and scales."""

    module: ConvertedModule
    rounded: Future[tuple[Tensor, Tensor]]


class Converter:
    """Reads tensors through `read`, and makes those of converted modules for `device`, in the order of `order`."""

    def __init__(
        self, read: Read, converted: ConvertedTensors, order: Iterable[Sequence[TensorEntry]], device: torch.device
    ) -> None:
        self._read = read
        self._converted = converted
        self._device = device
        entries = (entry for group in order for entry in group) if converted else ()
        modules = {converted[entry.name].name: converted[entry.name] for entry in entries if entry.name in converted}
        self._slabs = self._start_slabs(list(modules.values()))
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._num_torch_threads = torch.get_num_threads()
        # One of torch's threads in each of ours: its own wait for each other longer than a slab takes.
        self._pool = ThreadPoolExecutor(self._num_threads, "onebox-convert", lambda: torch.set_num_threads(1))
        self._under_way: deque[_Slab] = deque()
        self._growing: dict[str, _GrowingModule] = {}
        self._made: dict[str, Tensor] = {}

    def read(self, entry: TensorEntry) -> Tensor:
        """The tensor of `entry`; a `weight_shape` stays on the host."""
        if entry.name not in self._converted:
            return self._read(entry)
        while entry.name not in self._made:
            room = self._num_threads * _SLABS_PER_THREAD - len(self._under_way)
            self._under_way.extend(islice(self._slabs, room))
            if not self._under_way:
                raise MismatchError(f"{entry.name} was asked for twice, or is not in the order of loading.")
            self._take(self._under_way.popleft())
        return self._made.pop(entry.name)

    def _start_slabs(self, modules: list[ConvertedModule]) -> Iterator[_Slab]:
        for module in modules:
            for bound in slabs(module.source):
                stored = self._read(_stored_entry(bound))
                yield _Slab(module, self._pool.submit(_round, stored, module.target))

    def _take(self, slab: _Slab) -> None:
        """Copies the next rows of a module into its new tensors, which are complete with the last of them."""
        module = slab.module
        try:
            rounded = slab.rounded.result()
        except OneboxError as error:
            raise type(error)(f"{module.name}: {error}") from None
        if module.name not in self._growing:
            self._growing[module.name] = _GrowingModule(module, self._device)
        growing = self._growing[module.name]
        growing.add(rounded)
        if growing.is_complete:
            self._made |= self._growing.pop(module.name).tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._converted:
            torch.set_num_threads(self._num_torch_threads)


def _round(stored: Tensor, target: Stored) -> tuple[Tensor, Tensor]:
    return round_slab(stored.to(torch.float32), target)
