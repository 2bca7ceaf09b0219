"""Stock vLLM and what `onebox build` writes. Needs an environment of its own: `make vllm-test` makes it and runs this.

A CPU without AMX has no vLLM kernel for FP8 blocks, INT8 or INT4 experts, so dense INT4 layers are what runs here; for
the whole hybrid, vLLM's own configuration code is asked which scheme it finds for every module.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.spec.modules import ModuleClass, modules
from tests.stock_model import open_with_transformers
from tests.synthetic import tiny_config, write_checkpoint

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-vllm" / "bin" / "python"
pytestmark = pytest.mark.vllm
ROUNDING_OF_BF16 = 0.06  # mean logprob difference seen between transformers' own BF16 and float32 on such models


def run_in_vllm(script: str, *arguments: str) -> str:
    assert PYTHON.exists(), f"{PYTHON} is not there: `make vllm-test` makes vLLM's environment first"
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "shim"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(PYTHON), str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    return results[-1].removeprefix("RESULT ")


def test_stock_vllm_runs_a_build_and_gives_the_logprobs_of_transformers(tmp_path):
    config = tiny_config(
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128
    )
    base = write_checkpoint(tmp_path / "base", "bf16-fused", config=config)
    recipe = Recipe(attention=TargetFormat.INT4, delta=TargetFormat.INT4)
    run_build(plan_build(recipe, BuildSources(open_source("base", base))), tmp_path / "out")
    prompt = list(range(3, 67))
    theirs = torch.tensor(json.loads(run_in_vllm("logprobs.py", str(tmp_path / "out"), json.dumps(prompt))))
    model = open_with_transformers(tmp_path / "out")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert float((theirs - expected).abs().mean()) < ROUNDING_OF_BF16


def test_vllm_finds_the_scheme_we_meant_for_every_module(tmp_path, checkpoints):
    sources = BuildSources(open_source("base", checkpoints / "autoround"), open_source("fp8", checkpoints / "fp8"))
    recipe = Recipe(
        shared=TargetFormat.FP8, attention=TargetFormat.FP8, mtp=TargetFormat.INT4, lm_head=TargetFormat.INT8
    )
    out = tmp_path / "out"
    run_build(plan_build(recipe, sources), out)
    spec = inspect_checkpoint(out).spec
    linears = [m for m in modules(spec) if m.is_matrix and m.module_class is not ModuleClass.EMBEDDING]
    # vLLM's own order of the prefix: language_model.model.layers instead of model.language_model.layers.
    names = {m.name.replace("model.language_model.", "language_model.model."): m for m in linears}
    (tmp_path / "names.json").write_text(json.dumps(list(names)))
    found = json.loads(run_in_vllm("schemes.py", str(out), str(tmp_path / "names.json")))
    int4, fp8, int8 = [4, "int", "group"], [8, "float", "block"], [8, "int", "channel"]
    expected = {
        ModuleClass.EXPERTS: int4,
        ModuleClass.DELTA: int4,
        ModuleClass.DELTA_GATES: int4,
        ModuleClass.ATTENTION: fp8,
        ModuleClass.SHARED: fp8,
        ModuleClass.LM_HEAD: int8,
        ModuleClass.MTP_EXPERTS: int4,
        ModuleClass.MTP_SHARED: int4,
        ModuleClass.MTP_ATTENTION: int4,
        ModuleClass.MTP_FC: None,
    }
    # DeltaNet shares --attention's format unless --delta says otherwise; this recipe left it as it was.
    for name, module in names.items():
        assert found[name] == expected[module.module_class], name
