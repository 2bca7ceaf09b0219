"""Copies between memory and staging buffers, by threads of the disk tier, beside the engine's steps.

On a GPU the copies are queued on a stream of their own, behind a fence that the engine's thread put after the steps
queued so far: pages that a prefix is read into may have been another's until then. Whoever copies waits for the copy,
so that what the engine's thread queues after it was told comes after it.
"""

import mmap
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onebox.engine.disk.layout import PrefixLayout
from onebox.spec.errors import DoesNotFitError
from onebox.store.chunk import Chunk

__all__ = ["Fence", "PrefixTransfer", "StagingBuffer"]

Fence = torch.cuda.Event | None
"""After the steps queued so far; None on a CPU, where a step is done when it was queued."""


class StagingBuffer:
    """Host memory for one chunk, page-aligned for direct reads, pinned for a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., StagingBuffer] | None = None
        if device.type == "cuda":
            address = self.tensor.data_ptr()
            code = int(_cuda_runtime().cudaHostRegister(address, size, 0))
            if code:
                raise DoesNotFitError(f"{size >> 20} MiB could not be pinned for prefixes on disk: CUDA error {code}.")
            # Also if nobody closes it: the addresses of memory that was returned pinned could not be pinned again.
            self._unpin = weakref.finalize(self, _cuda_runtime().cudaHostUnregister, address)
            self._unpin.atexit = False
        else:
            self.tensor.zero_()  # taken from the system now, not when a request waits

    def close(self) -> None:
        """After the last copy."""
        if self._unpin:
            self._unpin()


class PrefixTransfer:
    """The copies of one memory. `fence` is called by the engine's thread, all else by any."""

    def __init__(self, layout: PrefixLayout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def new_buffer(self) -> StagingBuffer:
        return StagingBuffer(self.layout.buffer_bytes, self._device)

    def fence(self) -> Fence:
        """After everything that the engine's thread has queued on the device."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def save(
        self, chunk: Chunk, pages: Sequence[int], checkpoint: int, buffer: StagingBuffer, fence: Fence
    ) -> memoryview:
        """The chunk's bytes in the buffer."""
        with torch.inference_mode(), self._on_stream():
            self._wait(fence)
            self.layout.gather(chunk, pages, checkpoint, buffer.tensor[: chunk.num_bytes])
            self._finish()
        return buffer.bytes[: chunk.num_bytes]

    def restore(
        self,
        chunk: Chunk,
        pages: Sequence[int],
        checkpoint: int,
        buffer: StagingBuffer,
        fence: Fence,
        first_page: int = 0,
    ) -> None:
        """Puts the chunk's bytes from the buffer into memory, but for pages before `first_page`."""
        with torch.inference_mode(), self._on_stream():
            self._wait(fence)
            source: Tensor = buffer.tensor[: chunk.num_bytes]
            self.layout.scatter(chunk, pages, checkpoint, source, first_page)
            self._finish()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self, fence: Fence) -> None:
        if self._stream is not None and fence is not None:
            self._stream.wait_event(fence)

    def _finish(self) -> None:
        """Waits for the copies of this thread, without holding the interpreter's lock."""
        if self._stream is not None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
