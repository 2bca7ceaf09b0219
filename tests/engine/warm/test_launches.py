"""The launches before an engine is ready meet every kernel that its steps ask for later."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, random, sys
import numpy as np, torch
from onebox.engine.config import EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.inputs import StepSizes
from onebox.engine.prefill import Prefiller
from onebox.engine.shapes import StepShapes
from onebox.engine.step import PromptChunk, StateSave
from onebox.engine.decode import Decoder
from onebox.engine.warm import launches
from onebox.engine.warm.compile import _distinct_layers
from onebox.kernels.common.ahead import compile_only
from onebox.kernels.common.target import AbsentGpu
from onebox.model.dummy import HYBRID, dummy_model
from onebox.model.memory import Memory, MemoryShape
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec

kv, method, drafts = sys.argv[1], sys.argv[2], int(sys.argv[3])
asked = []
compile_only(AbsentGpu(121, "NVIDIA GB10"), lambda _: None, lambda name: bool(asked.append(name)))
spec, meta = named_spec("qwen3.5-35b-a3b"), torch.device("meta")
config = EngineConfig(
    10_000,
    1000,
    num_checkpoints=4,
    max_num_seqs=8,
    max_num_batched_tokens=8192,
    speculation=SpeculationConfig(SpeculationMethod(method), drafts),
)
shape = MemoryShape(KVFormat.parse(kv), 1001, 8, 4, config.rows_per_sequence, config.speculation.with_mtp)
memory = Memory.allocate(spec, shape, torch.bfloat16, meta)
model, memory = _distinct_layers(dummy_model(spec, HYBRID, meta), memory)
launches.launch_all(model, memory, config)
known = len(asked)

draw, decoder, shapes = random.Random(1), Decoder(model, memory), StepShapes.of(config)
with torch.inference_mode():
    for count in range(1, 9):
        launches._launch_first_tokens(decoder, shapes, count, spec.hidden_size)
    for num_sequences, choices in shapes.rows.items():
        for num_rows in choices:
            for num_pages in shapes.widths:
                launches._launch_decode(decoder, shapes, StepSizes(num_rows, num_sequences, num_pages))
    for _ in range(12):
        chunks = []
        for slot in range(draw.choice([1, 1, 2, 5])):
            start, length = 64 * draw.randrange(4), draw.choice([1, 2, 16, 63, 64, 65, 128, 700, 1024, 3900])
            pages = np.arange(1, 2 + (start + length) // 64, dtype=np.int32)
            saves = (StateSave(start + 64, 0),) if length > 64 and draw.random() < 0.5 else ()
            chunks.append(PromptChunk(str(slot), slot, (0,) * length, start, pages, saves, None))
        Prefiller(model, memory, 8, memory.mtp is not None).run(chunks)
    for count in range(1, 65):
        model.logits(torch.empty(count, spec.hidden_size, dtype=torch.bfloat16, device=meta))
print(json.dumps({"known": known, "new": asked[known:]}))
"""


@pytest.mark.parametrize(
    ("kv", "method", "drafts"), [("bf16", "auto", 4), ("turboquant", "none", 0), ("fp8", "mtp", 2)]
)
def test_no_step_asks_for_a_kernel_that_was_not_compiled_ahead(kv, method, drafts):
    command = [sys.executable, "-c", PROGRAM, kv, method, str(drafts)]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
    assert found["known"] > 40
    assert not found["new"]
