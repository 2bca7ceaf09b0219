"""Models and engines that the engine's tests share."""

from collections.abc import Callable

import pytest
import torch

from onebox.engine.engine import Engine
from onebox.model.load import load_model
from tests.conftest import HAS_GPU
from tests.engine.fake import FakeRunner
from tests.engine.gate import Gate
from tests.engine.played import PlayedRecorder, play_gpu
from tests.engine.small import config


@pytest.fixture(scope="session")
def gate(checkpoint) -> Gate:
    """The equality gate over the tiny random model, on the GPU if there is one."""
    if HAS_GPU:
        return Gate(load_model(checkpoint, torch.device("cuda"), torch.bfloat16))
    return Gate(load_model(checkpoint, torch.device("cpu"), torch.float32))


@pytest.fixture(scope="session", params=["bf16-fused", "autoround"])
def gpu_gate(request, checkpoints) -> Gate:
    """The same over checkpoints of other formats, on the GPU."""
    return Gate(load_model(checkpoints / request.param, torch.device("cuda"), torch.bfloat16))


@pytest.fixture(scope="session")
def _played_gates() -> dict[str, Gate]:
    return {}


@pytest.fixture
def played_gate(monkeypatch, checkpoint, checkpoints, _played_gates) -> Callable[[str], Gate]:
    """By the kind of a checkpoint (`tiny`: the random one): the gate of a GPU that is played on this CPU."""
    play_gpu(monkeypatch)

    def find(kind: str = "tiny") -> Gate:
        if kind not in _played_gates:
            directory = checkpoint if kind == "tiny" else checkpoints / kind
            _played_gates[kind] = Gate(load_model(directory, torch.device("cpu"), torch.bfloat16), PlayedRecorder)
        return _played_gates[kind]

    return find


@pytest.fixture
def fake():
    """(engine, runner) with two slots and two places in the queue."""
    runner = FakeRunner(config())
    with Engine(runner, runner.config) as engine:
        runner.scheduler = engine._scheduler
        yield engine, runner
        runner.gate.set()
