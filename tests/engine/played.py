"""A GPU played on a CPU: what an engine does on a GPU, with the kernels' twins, and functions called for graphs.

The model is the one of a GPU: weights as stored, fused layers, the block drafter's too. So are the steps: all shapes
captured before the first request, batches with blank rows, the next forward pass queued before the outcome is known.
What a kernel leaves unset is NaN. Not played are CUDA's own parts, copies under way and several streams, and the
kernels' arithmetic, which `tests/kernels` compares with the twins.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.engine.capture import GraphRecorder
from onebox.kernels.common import dispatch


def play_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU count as a GPU: models loaded and steps run from now on are those of one."""
    monkeypatch.setattr(dispatch, "KERNEL_DEVICES", {*dispatch.KERNEL_DEVICES, "cpu"})
    # The forms for a CPU take no blank rows.
    monkeypatch.setattr(dispatch.Operation, "cpu", property(lambda operation: operation.twin))


class PlayedGraph:
    """Does its work at every replay and leaves the result where the first one was, as a captured graph does."""

    def __init__(self, recorder: "PlayedRecorder", work: Callable[[], Any]) -> None:
        self._recorder, self._work = recorder, work
        self._result: Tensor | None = work()
        self.num_replays = 0

    @property
    def result(self) -> Tensor | None:
        return self._result

    def replay(self) -> None:
        self.num_replays += 1
        self._recorder.spoil_results(self)
        found = self._work()
        if self._result is not None:
            self._result.copy_(found)

    def spoil(self) -> None:
        if self._result is not None:
            self._result.fill_(float("nan"))


class PlayedEvent:
    """The device's event; keeps the order in which things happen."""

    def __init__(self) -> None:
        self.happened: list[object] = []

    def record(self) -> None:
        self.happened.append("given")

    def synchronize(self) -> None:
        self.happened.append("read")


class PlayedRecorder(GraphRecorder):
    """Graphs share their memory: a graph's result is lost when one that was captured before it runs."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.graphs: list[PlayedGraph] = []

    def record(self, work: Callable[[], Any]) -> Any:
        graph = PlayedGraph(self, work)
        self.graphs.append(graph)
        return graph, graph.result

    def spoil_results(self, running: PlayedGraph) -> None:
        for graph in reversed(self.graphs):
            if graph is running:
                break
            graph.spoil()

    def synchronize(self) -> None:
        pass

    def new_event(self) -> Any:
        return PlayedEvent()
