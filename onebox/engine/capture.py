"""Recording CUDA graphs that share one pool of memory: one of them runs at a time.

What a graph returns lies in memory that those captured before it may write: it is valid until one of them runs.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["GraphRecorder"]

T = TypeVar("T")


class GraphRecorder:
    """Captures work on a stream of its own. The largest work comes first: the others then share its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of the work, and the tensors it writes. It is run once, over the inputs as they are."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Not by `torch.cuda.graph`, which collects garbage and empties the cache each time.
        with torch.cuda.stream(self._stream):
            # Relaxed: the first launch of a kernel loads its code, which a stricter mode forbids during a capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = work()
            finally:
                graph.capture_end()
        graph.instantiate()
        # The first launch also sends the graph to the device: that must not happen while answers wait.
        graph.replay()
        return graph, result

    @property
    def is_pinned(self) -> bool:
        """Whether what crosses between host and device is in pinned memory on the host."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits for all work given to the device."""
        torch.cuda.synchronize(self.device)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]
