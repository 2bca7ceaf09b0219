"""Fetching from the hub: only what is needed, from one commit, verified, and again after a cut or a kill."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from onebox.checkpoint import fetch, part, retry
from onebox.checkpoint.fetch import plan_tensors, plan_whole, run_fetch
from onebox.checkpoint.partial import MTP_CLASSES
from onebox.checkpoint.source import open_checkpoint, read_tensor
from onebox.spec.errors import UnreadableError
from onebox.spec.modules import ModuleClass
from tests.hub_server import Fault

REPO = "Qwen/Small-FP8"
SHARED = frozenset({ModuleClass.SHARED})
WEIGHTS = r"\.safetensors$"


@pytest.fixture
def fp8(hub, checkpoints):
    hub.add(REPO, checkpoints / "fp8-sharded")
    return checkpoints / "fp8-sharded"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    """Retries without their pauses, and stretches that the small checkpoints have several of."""
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(fetch, "REQUEST_BYTES", 200_000)
    monkeypatch.setattr(part, "RECORD_BYTES", 20_000)


def whole_files(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.name != "onebox_source.json"
    }


def test_the_tensors_of_a_class_arrive_bit_for_bit_and_little_else(hub, fp8, tmp_path):
    plan = plan_tensors(REPO, SHARED, tmp_path / "out")
    before = hub.bytes_sent(WEIGHTS)
    directory = run_fetch(plan)
    fetched, original = open_checkpoint(directory), open_checkpoint(fp8)
    shared = [name for name in original.tensors if ".shared_expert." in name and not name.startswith("mtp")]
    assert shared
    assert set(shared) <= set(fetched.tensors)
    for name, entry in fetched.tensors.items():
        assert read_tensor(entry) == read_tensor(original.tensors[name]), name
        assert name in shared or "norm" in name or name.endswith(("A_log", "dt_bias")), name
    used = sum(entry.nbytes for entry in fetched.tensors.values())
    assert used < 0.2 * sum(entry.nbytes for entry in original.tensors.values())
    assert hub.bytes_sent(WEIGHTS) - before == used
    for path in directory.glob("*.safetensors"):
        load_file(path)


def test_tensors_side_by_side_are_one_request(hub, fp8, tmp_path):
    plan = plan_tensors(REPO, MTP_CLASSES, tmp_path / "out")
    hub.requests.clear()
    run_fetch(plan)
    asked = [served for served in hub.requests if served.range and served.sent]
    num_tensors = sum(len(file.tensors or ()) for file in plan.origin.files)
    assert len(asked) < num_tensors / 2


def test_the_directory_says_where_it_came_from(hub, fp8, tmp_path):
    commit = hub.add(REPO, fp8)
    run_fetch(plan_tensors(REPO, SHARED, tmp_path / "out"))
    saved = json.loads((tmp_path / "out" / "onebox_source.json").read_text())
    assert (saved["repo"], saved["commit"], saved["only"]) == (REPO, commit, ["shared expert"])
    for name, file in saved["files"].items():
        original = (fp8 / name).read_bytes()
        for tensor in file.get("tensors", {}).values():
            begin, end = tensor["range"]
            assert original[begin:end] in (tmp_path / "out" / name).read_bytes()


def test_an_mtp_head_outside_the_index_is_found(hub, checkpoints, tmp_path):
    hub.add("Intel/Small", checkpoints / "autoround-sharded")
    original = open_checkpoint(checkpoints / "autoround-sharded")
    run_fetch(plan_tensors("Intel/Small", MTP_CLASSES, tmp_path / "out"))
    fetched = set(open_checkpoint(tmp_path / "out").tensors)
    assert {name for name in original.tensors if name.startswith("mtp.")} <= fetched


def test_all_files_arrive_as_they_are(hub, fp8, tmp_path):
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert whole_files(tmp_path / "out") == whole_files(fp8)


def test_files_that_no_checkpoint_needs_stay_on_the_hub(hub, fp8, tmp_path):
    shutil.copytree(fp8, tmp_path / "with-more")
    (tmp_path / "with-more" / "weights.gguf").write_bytes(bytes(1000))
    (tmp_path / "with-more" / "original").mkdir()
    (tmp_path / "with-more" / "original" / "other.safetensors").write_bytes(bytes(1000))
    hub.add(REPO, tmp_path / "with-more")
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert whole_files(tmp_path / "out") == whole_files(fp8)


def test_huggingface_hub_takes_a_fetched_directory_for_its_own_download(hub, fp8, tmp_path):
    from huggingface_hub import snapshot_download

    run_fetch(plan_whole(REPO, tmp_path / "ours"))
    theirs = Path(snapshot_download(REPO))
    assert whole_files(tmp_path / "ours") == whole_files(theirs)


@pytest.mark.parametrize("plan_of", [plan_whole, lambda repo, out: plan_tensors(repo, MTP_CLASSES, out)])
def test_cut_connections_cost_little(hub, fp8, tmp_path, plan_of):
    expected = plan_of(REPO, tmp_path / "expected")
    run_fetch(expected)
    hub.requests.clear()
    hub.fail(Fault.CUT, path=WEIGHTS, times=20, after_bytes=50_000)
    plan = plan_of(REPO, tmp_path / "out")
    waits: list[str] = []
    run_fetch(plan, on_wait=waits.append)
    assert whole_files(tmp_path / "out") == whole_files(tmp_path / "expected")
    assert waits
    headers = 8 * 3 + sum(len(file.read_bytes()) for file in fp8.glob("*.safetensors")) // 20
    assert hub.bytes_sent(WEIGHTS) <= plan.nbytes + headers


def test_a_second_run_asks_only_for_the_rest(hub, fp8, tmp_path, monkeypatch):
    plan = plan_whole(REPO, tmp_path / "out")
    hub.requests.clear()
    monkeypatch.setattr(retry, "MAX_RETRIES", 0)
    hub.fail(Fault.CUT, path=WEIGHTS, times=1, after_bytes=100_000)
    with pytest.raises(UnreadableError, match="run the same command again to resume"):
        run_fetch(plan)
    first = hub.bytes_sent(WEIGHTS)
    again = plan_whole(REPO, tmp_path / "out")
    assert again.missing_bytes < plan.nbytes
    hub.requests.clear()
    counted: list[int] = []
    run_fetch(again, counted.append)
    assert not [served for served in hub.requests if served.path.startswith("/api/")]
    assert hub.bytes_sent(WEIGHTS) < plan.nbytes
    assert first + hub.bytes_sent(WEIGHTS) < 1.3 * plan.nbytes
    assert sum(counted) == plan.nbytes
    assert whole_files(tmp_path / "out") == whole_files(fp8)


def test_a_complete_directory_needs_no_network(hub, fp8, tmp_path):
    run_fetch(plan_tensors(REPO, SHARED, tmp_path / "out"))
    hub.requests.clear()
    counted: list[int] = []
    plan = plan_tensors(REPO, SHARED, tmp_path / "out")
    assert plan.missing_bytes == 0
    run_fetch(plan, counted.append)
    assert hub.requests == []
    assert sum(counted) == plan.nbytes


_FETCH = """
import sys
from pathlib import Path
from onebox.checkpoint import fetch, part
from onebox.checkpoint.partial import MTP_CLASSES
part.RECORD_BYTES = 20_000
plan = fetch.plan_tensors(sys.argv[1], MTP_CLASSES, Path(sys.argv[2]))
print("planned", flush=True)
fetch.run_fetch(plan)
"""


def test_a_killed_fetch_goes_on_where_it_was(hub, fp8, tmp_path):
    run_fetch(plan_tensors(REPO, MTP_CLASSES, tmp_path / "expected"))
    hub.requests.clear()
    hub.bytes_per_second = 40_000
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-c", _FETCH, REPO, tmp_path / "out"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"planned\n"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not _recorded(tmp_path / "out"):
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stdout.close()
    hub.bytes_per_second = 0
    hub.settle()
    plan = plan_tensors(REPO, MTP_CLASSES, tmp_path / "out")
    assert 0 < plan.missing_bytes <= plan.nbytes - _recorded(tmp_path / "out")
    missing_bytes = plan.missing_bytes
    hub.requests.clear()
    run_fetch(plan)
    assert hub.bytes_sent(WEIGHTS) <= missing_bytes
    assert whole_files(tmp_path / "out") == whole_files(tmp_path / "expected")


def _recorded(directory: Path) -> int:
    """Bytes of weights that journals say have arrived."""
    lines = [line.split() for path in directory.glob("*.journal") for line in path.read_text().splitlines()]
    return sum(int(line[1]) for line in lines if len(line) == 3 and line[0] != "0" and line[0].isdigit())
