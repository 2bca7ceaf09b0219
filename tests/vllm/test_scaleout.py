"""`onebox scaleout` with stock vLLM: its rules against vLLM's own code, and real launches on two ranks.

Needs vLLM's own environment: `make vllm-test` makes it and runs this. The CPU build has no kernel for INT4 experts, FP8
blocks or INT8, so what runs is BF16 and INT4 in attention and DeltaNet; the rest is held against vLLM's configuration
code. Two nodes are two network namespaces with an address and an sshd each.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onebox.checkpoint.bind import bind
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.fleet.process import free_ports
from onebox.pocket.builds import BUILDS
from onebox.scaleout.check import CheckRequest, check_checkpoint
from onebox.scaleout.flags import SAME, TRANSLATED
from onebox.scaleout.launch import failure_cause
from onebox.scaleout.versions import METHODS
from tests.vllm.nodes import machines, why_not
from tests.vllm.test_bench import HERE, POCKET, PYTHON, ROOT
from tests.vllm.test_vllm import run_in_vllm

pytestmark = pytest.mark.vllm
PATIENCE_S = 900
INT4 = TargetFormat.INT4
DENSE_INT4 = Recipe(attention=INT4, delta=INT4)


def build(recipe, out, **more):
    run_build(plan_build(recipe, BuildSources(open_source("base", POCKET)), **more), out)
    return out


def loosened(config):
    """As tools with less care write it: by class, with the head and one gate by plain name."""
    config["config_groups"]["group_0"]["targets"].append("Linear")
    config["ignore"] = ["lm_head", "model.language_model.layers.0.linear_attn.in_proj_a", "mtp.fc", "re:.*visual.*"]


@pytest.mark.parametrize("name", ["hybrid-int8-head-int4-mtp", "hybrid-int34", "int4", "fp8", "nvfp4", "loosened"])
def test_the_check_finds_the_scheme_that_vllm_finds_for_every_layer(tmp_path, name):
    out = build(BUILDS["hybrid-int8-head" if name == "loosened" else name], tmp_path / "out")
    if name == "loosened":
        config = json.loads((out / "config.json").read_text())
        loosened(config["quantization_config"])
        (out / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(out)
    found = check_checkpoint(opened, bind(opened), CheckRequest())
    asked = [
        (asked_name, layer.layer.class_name, layer.layer.module_class.in_mtp, layer)
        for layer in found.layers
        for asked_name in layer.layer.asked_names[:1]
    ]
    (tmp_path / "layers.json").write_text(json.dumps([one[:3] for one in asked]))
    theirs = json.loads(run_in_vllm("layer_schemes.py", str(out), str(tmp_path / "layers.json")))
    for (layer_name, _, _, layer), expected in zip(asked, theirs, strict=True):
        scheme = layer.resolution.scheme
        ours = scheme and [scheme.num_bits, scheme.type, scheme.strategy, scheme.group_size]
        if isinstance(expected, str):
            assert layer.resolution.complaint, (layer_name, expected)
        else:
            assert (ours, layer.resolution.complaint) == (expected, None), layer_name
    assert any(theirs)


def test_the_list_of_vllms_flags_is_that_of_the_installed_one():
    """`make test` holds our reading of launch lines against this list."""
    listed = Path(__file__).parents[1] / "cli" / "vllm_flags.json"
    assert json.loads(run_in_vllm("serve_flags.py")) == json.loads(listed.read_text())


def test_every_flag_that_is_passed_on_is_one_of_vllms():
    flags = set(json.loads(run_in_vllm("serve_flags.py")))
    passed = {f"--{name}" for name in SAME | TRANSLATED} - {"--allow-open-server", "--disable-log-requests"}
    made = {
        "--no-enable-log-requests",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--headless",
        "--tensor-parallel-size",
    }
    made |= {"--pipeline-parallel-size", "--distributed-executor-backend", "--enable-auto-tool-choice"}
    assert passed | made | {"--tool-call-parser", "--reasoning-parser"} <= flags


def test_the_methods_of_drafting_are_vllms():
    assert sorted(METHODS) == json.loads(run_in_vllm("draft_methods.py"))


def test_vllm_drafts_with_the_mtp_head_of_a_build_that_lists_draft_tokens(tmp_path):
    """Its loader stops at the list where it meets it; the list changes nothing for vLLM."""
    listed = build(Recipe(), tmp_path / "listed", draft_vocab=list(range(4000)))
    prompt = json.dumps(list(range(3, 40)))
    first, second = (json.loads(run_in_vllm("drafted.py", str(one), prompt, "2")) for one in (POCKET, listed))
    assert first == second
    assert len(first) == 8


class Launch:
    """`onebox scaleout launch` as a process of its own."""

    def __init__(self, log, model, port, *options, binding):
        self.log = log
        environment = {
            "PYTHONPATH": str(HERE / "shim"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": binding,
        }
        given = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        program = shlex.join([str(PYTHON), "-m", "vllm.entrypoints.cli.main"])
        serve = "--dtype bfloat16 --max-model-len 2048 --max-num-seqs 4 --enforce-eager --language-model-only"
        words = [sys.executable, "-m", "onebox.cli.main", "scaleout", "launch", str(model), "--tp", "2"]
        words += [*options, "--program", program, *given, "--", *serve.split(), "--port", str(port)]
        words += ["--served-model-name", "pocket", "--allow-open-server"]
        with log.open("w") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)

    @property
    def text(self):
        return self.log.read_text()

    def wait_until_ready(self):
        end = time.monotonic() + PATIENCE_S
        while "Ready after" not in self.text:
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < end, self.text[-3000:]
            time.sleep(0.5)

    def last_words(self):
        """After its own end: what it said to standard error."""
        assert self.process.wait(120) == 1
        return [line for line in self.text.splitlines() if line.startswith("onebox: ")]


@contextlib.contextmanager
def launched(*arguments, **options):
    launch = Launch(*arguments, **options)
    try:
        launch.wait_until_ready()
        yield launch
    finally:
        if launch.process.poll() is None:
            launch.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.process.wait(120)
        launch.process.kill()
        launch.process.wait()


def sessions(mark):
    """The sessions of processes that have the variable `mark`, one a node; vLLM's workers overwrite theirs."""
    found = set()
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit() and mark.encode() in (place / "environ").read_bytes():
                found.add(os.getsid(int(place.name)))
    return found - {os.getsid(0)}


def processes(chosen):
    """Pids of these sessions, the dead that nobody asked for left out."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_alive = place.name.isdigit() and (place / "cmdline").read_bytes()
            if is_alive and os.getsid(int(place.name)) in chosen:
                found.append(int(place.name))
    return found


def name_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def until_gone(chosen):
    end = time.monotonic() + 60
    while left := processes(chosen):
        assert time.monotonic() < end, [name_of(pid) for pid in left]
        time.sleep(0.5)


@pytest.fixture(params=["bf16", "dense-int4"])
def model(request, tmp_path):
    """A checkpoint at a path of its own."""
    if request.param == "bf16":
        return Path(shutil.copytree(POCKET, tmp_path / "bf16"))
    return build(DENSE_INT4, tmp_path / "dense-int4")


def compared(run_cli, url, model):
    result = run_cli("scaleout", "compare", url, model, "--json")
    assert result.code == 0, result.out + result.err
    found = json.loads(result.out)
    assert found["mean_difference"] < 0.04  # 0.018 (BF16) and 0.023 (INT4) were seen
    assert found["same_likeliest"] > 0.95


def test_two_processes_serve_one_model_and_a_killed_rank_ends_both(tmp_path, run_cli, model):
    port, mark = free_ports(1)[0], f"ONEBOX_TEST={tmp_path.name}-{os.getpid()}"
    with launched(tmp_path / "log", model, port, "--env", mark, binding="0|1") as launch:
        compared(run_cli, f"http://127.0.0.1:{port}", model)
        nodes = sessions(mark)
        worker = next(pid for pid in processes(nodes) if "VLLM::Worker_TP1" in name_of(pid))
        os.kill(worker, signal.SIGKILL)
        told = launch.last_words()
    assert len(told) == 1
    assert "Node 0 on localhost ended with status" in told[0]
    assert "its worker VllmWorker-1 died" in told[0]
    assert told[0].endswith(" All nodes are stopped.")
    until_gone(nodes)


def test_two_nodes_serve_one_model_and_a_killed_rank_ends_the_other(tmp_path, run_cli, model):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    mark = f"ONEBOX_TEST={tmp_path.name}-{os.getpid()}"
    with machines(tmp_path) as (addresses, ssh):
        options = ("--hosts", ",".join(addresses), "--ssh", ssh, "--env", mark)
        with launched(tmp_path / "log", model, 8000, *options, binding="nobind") as launch:
            compared(run_cli, f"http://{addresses[0]}:8000", model)
            nodes = sessions(mark)
            names = {pid: name_of(pid) for pid in processes(nodes)}
            node = next(pid for pid, name in names.items() if " --headless" in name and name.startswith(str(PYTHON)))
            os.kill(node, signal.SIGKILL)
            told = launch.last_words()
        assert told == [
            f"onebox: Node 1 on {addresses[1]} was killed by SIGKILL while it served. All nodes are stopped."
        ]
        until_gone(nodes)


def test_what_vllm_refuses_is_told_in_one_sentence(tmp_path):
    """Four ranks where one CPU core is bound to each of two: the reason is vLLM's own."""
    log = tmp_path / "log"
    launch = Launch(log, POCKET, free_ports(1)[0], binding="0")
    told = launch.last_words()
    assert len(told) == 1
    assert told[0].startswith("onebox: Node 0 on localhost ended with status 1 before it served: ")
    assert failure_cause(launch.text.splitlines()) in told[0]
