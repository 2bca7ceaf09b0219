"""What a failed sequence left in memory harms nobody who gets its pages, its slot or its checkpoints afterwards."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch

from onebox.engine.api import Engine, EngineConfig, Request, SamplingParams, SpeculationConfig, SpeculationMethod
from onebox.engine.runner import ModelRunner
from onebox.model.load import load_model
from onebox.model.memory import Memory, MemoryShape
from onebox.spec.kv import KVFormat
from tests.conftest import HAS_GPU
from tests.engine.fake import tokens_of


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def poison(memory: Memory) -> int:
    """Every bit of every byte set: NaN in all floating-point formats."""
    num_tensors = 0
    for tensor in tensors_of(memory):
        tensor.view(torch.uint8).fill_(0xFF)
        num_tensors += 1
    return num_tensors


@pytest.mark.parametrize("kv", ["bf16", "fp8", "turboquant"])
@pytest.mark.parametrize("method", ["none", "mtp"])
def test_memory_full_of_nan_changes_no_answer(checkpoint, kv, method):
    device, dtype = (torch.device("cuda"), torch.bfloat16) if HAS_GPU else (torch.device("cpu"), torch.float32)
    model = load_model(checkpoint, device, dtype)
    speculation = SpeculationConfig(SpeculationMethod(method), 0 if method == "none" else 3)
    config = EngineConfig(400, 20, num_checkpoints=3, max_num_seqs=3, speculation=speculation)
    shape = MemoryShape(KVFormat.parse(kv), 21, 3, 3, config.rows_per_sequence, speculation.with_mtp)
    answers = []
    for is_poisoned in (False, True):
        memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
        if is_poisoned:
            assert poison(memory) > 5
        with Engine(ModelRunner(model, memory, config), config) as engine:
            sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            prompts = [tuple(range(3, 3 + length)) for length in (1, 70, 130)]
            handles = [engine.submit(Request(str(place), prompt, sampling)) for place, prompt in enumerate(prompts)]
            handles.append(engine.submit(Request("again", prompts[2], sampling)))
            answers.append([tokens_of(handle) for handle in handles])
    assert answers[0] == answers[1]
    assert all(len(answer) == 30 for answer in answers[1])
