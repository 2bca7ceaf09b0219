"""`onebox service`: the unit that is written, checked by systemd's own tool where it is installed."""

import shutil
import subprocess

import pytest

from onebox.cli.service import unit_text
from onebox.planner.memory import MemoryRequest, plan_memory
from onebox.planner.presets import named_preset
from onebox.spec.hardware import BOXES, GIB
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec


def fields(text):
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_the_unit_restarts_on_failure_and_waits_until_the_model_is_ready(run_cli, monkeypatch):
    monkeypatch.setenv("ONEBOX_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("ONEBOX_API_KEY", "sk-secret")
    result = run_cli("service", "install", "--dry-run", "--", "--port", "9001")
    assert result.code == 0, result.err
    unit = fields(result.out)
    assert unit["ExecStart"].endswith("-m onebox serve --port 9001")
    assert (unit["Type"], unit["Restart"], unit["WantedBy"]) == ("notify", "on-failure", "default.target")
    # Two services share the directory of `onebox ps`; the end of one must not take it from the other.
    assert (unit["RuntimeDirectory"], unit["RuntimeDirectoryPreserve"]) == ("onebox", "yes")
    assert "Environment=ONEBOX_MAX_NUM_SEQS=3" in result.out
    assert "secret" not in result.out
    assert fields(run_cli("service", "install", "--system", "--dry-run").out)["WantedBy"] == "multi-user.target"


def test_systemd_waits_as_long_as_running_answers_may_take(run_cli):
    for words, stop_s in (((), 60), (("--", "--shutdown-timeout", "600"), 630)):
        assert fields(run_cli("service", "install", "--dry-run", *words).out)["TimeoutStopSec"] == str(stop_s)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_accepts_the_unit_with_spaces_and_percents_in_it(tmp_path, is_system):
    words = [f"{tmp_path}/a model", "--served-model-name", 'the "100%" one', "--hf-overrides", '{"a": 1}', "$HOME;"]
    text = unit_text(words, None, is_system=is_system, environment={"ONEBOX_DTYPE": "a b", "SUDO_USER": "root"})
    path = tmp_path / "onebox.service"
    path.write_text(text)
    done = subprocess.run(
        [shutil.which("systemd-analyze"), "verify", path], capture_output=True, text=True, check=False, timeout=120
    )
    told = [line for line in (done.stdout + done.stderr).splitlines() if "onebox.service" in line]
    assert (done.returncode, told) == (0, []), done.stderr


def test_memory_limits_fit_the_plan():
    spec = named_spec("qwen3.5-122b-a10b")
    stored = named_preset("hybrid").weight_bytes(spec)
    request = MemoryRequest(max_context_tokens=65_536, slots=4, kv=KVFormat.parse("bf16"))
    limits = []
    for box in ("dgx-spark", "h200"):
        plan = plan_memory(spec, stored, BOXES[box], request)
        unit = fields(unit_text([], plan, is_system=False))
        used = sum(part.bytes for part in plan.parts if part.name not in ("reserve", "unused"))
        limits.append((int(unit["MemoryHigh"][:-1]) * GIB, used))
        assert int(unit["MemoryMax"][:-1]) > int(unit["MemoryHigh"][:-1])
        assert unit["MemorySwapMax"] == "0"
    assert limits[0][0] > limits[0][1], "unified memory counts the model"
    assert limits[1][0] < 8 * GIB, "a GPU's own memory does not count"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["--", "--api-key", "sk-1"], "--api-key-file FILE"),
        (["--", "--host", "::"], "has no API key"),
        (["--", "-tp", "2"], "onebox scaleout"),
    ],
)
def test_what_serve_would_refuse_is_refused_before_anything_is_written(run_cli, words, told):
    result = run_cli("service", "install", "--dry-run", *words)
    assert result.code == 2
    assert told in result.err
    assert result.out == ""


def test_a_service_that_is_not_there_is_told(run_cli, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for verb in ("status", "logs", "uninstall"):
        result = run_cli("service", verb)
        assert (result.code, "onebox service install" in result.err) == (2, True)
