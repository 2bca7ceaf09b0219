"""Models and engines that the engine's tests share."""

import pytest
import torch

from onebox.engine.engine import Engine
from onebox.model.load import load_model
from tests.conftest import HAS_GPU
from tests.engine.fake import FakeRunner
from tests.engine.gate import Gate
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


@pytest.fixture
def fake():
    """(engine, runner) with two slots and two places in the queue."""
    runner = FakeRunner(config())
    with Engine(runner, runner.config) as engine:
        runner.scheduler = engine._scheduler
        yield engine, runner
        runner.gate.set()
