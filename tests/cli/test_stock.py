"""`onebox list`, `ps`, `stop` and `rm`, with servers that run and checkpoints that lie here."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onebox.spec.places import known_places, remember_place
from onebox.spec.running import registered, running_servers


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with nothing on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setattr("onebox.spec.running._SYSTEM", tmp_path / "run")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(machine):
    """A process that is registered as a server and ends on SIGTERM."""
    script = (
        "import signal\nfrom onebox.spec.running import registered\n"
        "with registered('qwen', '/srv/qwen', 'http://127.0.0.1:8123', 5 << 30):\n"
        "    print('ready', flush=True)\n    signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_nothing_here_says_what_to_do(run_cli, machine):
    assert "onebox up" in run_cli("list").out
    assert run_cli("ps").out == "No onebox serves on this machine.\n"
    assert run_cli("stop").code == 2
    assert json.loads(run_cli("list", "--json").out) == json.loads(run_cli("ps", "--json").out) == []


def test_a_running_server_is_listed_and_stopped(run_cli, server):
    (found,) = json.loads(run_cli("ps", "--json").out)
    assert (found["process_id"], found["model"], found["url"]) == (server.pid, "qwen", "http://127.0.0.1:8123")
    assert found["resident_bytes"] > 1 << 20
    shown = run_cli("ps").out.splitlines()
    assert shown[0].split() == ["PID", "MODEL", "URL", "SINCE", "PLANNED", "RESIDENT"]
    assert shown[1].split()[:3] == [str(server.pid), "qwen", "http://127.0.0.1:8123"]
    assert "5.0 GiB" in shown[1]
    assert "No onebox serves other" in run_cli("stop", "other").err
    done = subprocess.Popen([sys.executable, "-m", "onebox", "stop", "8123"], stdout=subprocess.PIPE, text=True)
    assert server.wait(120) == -signal.SIGTERM
    assert done.communicate(timeout=120)[0] == "Stopped qwen (http://127.0.0.1:8123).\n"
    assert running_servers() == []


def test_a_file_of_a_process_that_is_gone_counts_for_nothing(machine):
    with registered("qwen", "/srv/qwen", "http://127.0.0.1:1", 0):
        (path,) = (machine / "run").glob("*.json")
        record = json.loads(path.read_text())
        assert [one.model for one in running_servers()] == ["qwen"]
        path.write_text(json.dumps({**record, "started_ticks": 1}))  # the number is another process's now
        assert running_servers() == []
        assert not path.exists()
        (machine / "run" / "5.json").write_text("{")
        assert running_servers() == []


def test_of_two_servers_one_must_be_named(run_cli, server, machine):
    with registered("pocket", "pocket", "http://127.0.0.1:9", 0):
        result = run_cli("stop")
        assert (result.code, "2 servers run" in result.err) == (2, True)


@pytest.fixture
def copies(machine, checkpoints):
    shutil.copytree(checkpoints / "fp8", machine / "models" / "mine")
    shutil.copytree(checkpoints / "fp8", machine / "elsewhere")
    remember_place(Path("elsewhere"))
    return machine


def test_checkpoints_here_and_those_that_were_used_are_listed(run_cli, copies):
    rows = {row["name"]: row for row in json.loads(run_cli("list", "--json").out)}
    assert rows.keys() == {"mine", "elsewhere"}
    size = sum(path.stat().st_size for path in (copies / "elsewhere").iterdir())
    assert (rows["elsewhere"]["bytes"], rows["elsewhere"]["kind"]) == (size, "other")
    shown = run_cli("list").out.splitlines()
    assert [line.split()[0] for line in shown] == ["NAME", "elsewhere", "mine"]


def test_a_checkpoint_is_deleted_when_it_is_confirmed_and_not_served(run_cli, copies, monkeypatch):
    elsewhere = copies / "elsewhere"
    with registered("x", str(elsewhere), "http://127.0.0.1:9", 0):
        result = run_cli("rm", "elsewhere", "--yes")
        assert (result.code, "is being served by process" in result.err) == (1, True)
    monkeypatch.setattr("typer.confirm", lambda _: False)
    assert run_cli("rm", "elsewhere").code == 130
    assert elsewhere.is_dir()
    assert run_cli("rm", "elsewhere", "--yes").code == 0
    assert not elsewhere.exists()
    assert known_places() == []
    assert run_cli("rm", "models/mine", "--yes").code == 0
    assert run_cli("rm", "mine").code == 2


def test_only_checkpoints_are_deleted(run_cli, machine):
    (machine / "photos").mkdir()
    assert run_cli("rm", "photos", "--yes").code == 2
    assert (machine / "photos").is_dir()
