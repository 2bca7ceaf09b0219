"""Workers compile each kernel once, for a GPU that is not there, and Triton finds it again in another process."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys, time
import torch, triton
from onebox.engine.warm import compile as warm
from onebox.kernels.common.ahead import compile_only, settle_cache_keys
from onebox.kernels.common.target import AbsentGpu
from onebox.kernels.delta_net import gated_norm
from onebox.kernels.norm import rms_norm
from onebox.kernels.router import route

def launch_all(*_):
    rows = torch.empty(2, 256, dtype=torch.bfloat16, device="meta")
    heads = torch.empty(2, 2, 128, dtype=torch.bfloat16, device="meta")
    rms_norm(rows, torch.empty(256, device="meta"), 1e-6, torch.bfloat16)
    gated_norm(heads, heads, torch.empty(128, device="meta"), 1e-6)
    route(torch.empty(2, 16, device="meta"), 2, torch.empty(1, dtype=torch.int32, device="meta"))

settle_cache_keys()
if sys.argv[1] == "workers":
    warm.launch_all = launch_all
    counts = []
    job = warm.EngineLaunches(None, None, None, AbsentGpu(90, "NVIDIA H200"))
    print(json.dumps([*warm.run_workers(job, counts.append, 2)]))
else:
    names, compiled = [], []
    compile_only(AbsentGpu(90, "NVIDIA H200"), lambda launch: names.append(launch.name))
    triton.knobs.compilation.listener = lambda **known: compiled.append(known["cache_hit"])
    launch_all()
    print(json.dumps([names, compiled]))
"""


def run(role, cache):
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", PROGRAM, role]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def test_what_workers_compiled_is_found_by_the_engine(tmp_path):
    num_kernels, is_done = run("workers", tmp_path)
    assert is_done
    assert num_kernels == 3
    names, hits = run("engine", tmp_path)
    assert sorted(names) == ["gated_norm_kernel", "rms_norm_kernel", "route_kernel"]
    assert hits == [True] * 3
