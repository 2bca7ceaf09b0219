"""When an engine is ready, its process has loaded every kernel that later steps launch.

On a GPU that is played, in a process of its own: each operation also goes through its kernel's host function, which
asks Triton for the kernel as on a GPU; nothing is compiled.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, tempfile
from pathlib import Path
import pytest, torch
from onebox.kernels.common.ahead import compile_only
from onebox.kernels.common.dispatch import Operation
from onebox.kernels.common.target import AbsentGpu

asked = []
compile_only(AbsentGpu(90, "NVIDIA H200"), lambda _: None, lambda name: bool(asked.append(name)))
from onebox.engine.api import Engine, EngineConfig
from onebox.engine.warm.exercise import exercise
from onebox.model.load import load_model
from tests.engine.gate import SPECULATION, new_runner, read
from tests.engine.gate_prompts import BOUNDARY, EOS, TOKEN_TABLE, all_cases
from tests.engine.played import PlayedRecorder, play_gpu
from tests.synthetic import write_checkpoint

play_gpu(pytest.MonkeyPatch())
twin = Operation.__call__

def both(operation, *args, **kwargs):
    operation.kernel(*args, **kwargs)
    return twin(operation, *args, **kwargs)

Operation.__call__ = both
torch.set_num_threads(1)
kind, drafts = sys.argv[1:]
config = EngineConfig(
    4608,
    400,
    num_checkpoints=32,
    max_num_seqs=4,
    max_num_waiting=100,
    max_num_batched_tokens=1088,
    eos_token_ids=(EOS,),
    boundary_token_ids=(BOUNDARY,),
    speculation=SPECULATION[drafts],
)
with tempfile.TemporaryDirectory() as root:
    write_checkpoint(Path(root) / kind, kind)
    model = load_model(Path(root) / kind, torch.device("cpu"), torch.bfloat16)
runner = new_runner(model, "bf16", config, PlayedRecorder())
runner.rehearse()
exercise(runner, config, fully=True)
known = len(asked)
cases = [case for place, case in enumerate(all_cases()) if place % 4 == 0 or case.family == "special"]
with Engine(runner, config, TOKEN_TABLE) as engine:
    for handle in [engine.submit(case.request(case.name)) for case in cases]:
        read(handle)
ways = sorted({name for case in cases for name, value in vars(case.sampling).items() if value})
print(json.dumps({"known": known, "later": asked[known:], "ways": ways}))
"""


@pytest.mark.parametrize(("kind", "drafts"), [("autoround", "auto"), ("bf16-fused", "dflash7")])
def test_no_request_asks_for_a_kernel_that_the_warm_up_did_not_load(kind, drafts):
    command = [sys.executable, "-c", PROGRAM, kind, drafts]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not ran.returncode, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {"grammar", "logit_bias", "prompt_logprobs", "presence_penalty", "top_k"} <= set(found["ways"])
    assert found["known"] > 40
    assert not found["later"]
