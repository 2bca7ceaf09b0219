"""Everything that `onebox tune` tries first is compiled beforehand."""

import json
import os
import subprocess
import sys
from itertools import product

from onebox.kernels.common.tuning import MODES, WEIGHT_LOADS
from onebox.lab.trial_kernels import option_sets

PROGRAM = """
import json
from onebox.kernels.common.ahead import compile_only
from onebox.kernels.common.target import AbsentGpu
from onebox.kernels.common.tuning import launched, set_options
from onebox.lab import tune
from onebox.spec.shapes import named_spec

jobs, asked = [], set()
tune.run_workers = lambda job, _: jobs.append(job) or (0, True)
tuning = tune.Tuning(tune.few_layers(named_spec("qwen3.5-122b-a10b"), 4), 1.0, steps=(tune.StepShape(1, 3),))
gpu = AbsentGpu(90, "NVIDIA H200")
compile_only(gpu, lambda _: None, lambda name: bool(asked.add(name)))
tune.compile_trials(tuning, gpu)
(job,) = jobs
job.launch()
ahead = set(asked)
set_options(job.options)
launched(forget=True)
job.steps[0]()
missing = []
for key, option in tune.trials(launched()):
    asked.clear()
    set_options({**job.options, key: {**job.options.get(key, {}), **option}})
    job.steps[0]()
    missing += [f"{key} {option}"] * (not asked <= ahead)
print(json.dumps([len(ahead), missing]))
"""


class Kernel:
    def __init__(self, tried):
        self.tried = tried


def test_every_candidate_is_in_some_set_under_each_mode_and_what_is_known_stays():
    kernels = {"int4_8_16": Kernel(WEIGHT_LOADS), "route_3072": Kernel(MODES)}
    known = {"int4_8_16": {"UNROLL": 3, "PREFETCH": 1}, "other": {"dependent": 2}}
    sets = list(option_sets(kernels, known))
    for option, mode in product(WEIGHT_LOADS, MODES):
        if option not in MODES:
            assert any(found["int4_8_16"] == {**known["int4_8_16"], **option, **mode} for found in sets)
    assert all(any(found["route_3072"] == mode for found in sets) for mode in MODES)
    assert all(found["other"] == {"dependent": 2} for found in sets)


def test_no_trial_of_a_step_asks_for_a_kernel_that_was_not_compiled_ahead():
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=env)
    num_kernels, missing = json.loads(done.stdout)
    assert num_kernels > 100
    assert not missing
