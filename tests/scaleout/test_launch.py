"""A launch over a stand-in `ssh`: the commands, and what happens when a node ends. tests/vllm has the real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onebox.fleet.process import free_ports
from onebox.scaleout.launch import failure_cause
from tests.scaleout.standins import install, make_host, make_spark_sysfs

PATIENCE_S = 60


@pytest.fixture
def boxes(tmp_path, monkeypatch):
    """Two hosts, spark-1 and spark-2, with a cable between them, and a directory that is a model to a launch."""
    root = install(tmp_path, monkeypatch)
    for number in (1, 2):
        make_host(root, f"spark-{number}", {"enp1s0f1np1": f"192.168.177.1{number}/24"})
    make_spark_sysfs(root)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("{}")
    return root


def arguments(root, *more, port=8000):
    # The address of the stand-in's server; a real head listens on its own.
    serve = ("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048")
    options = ("--hosts", "spark-1,spark-2", "--tp", "2", "--sysfs", str(root / "sys"))
    return ("scaleout", "launch", str(root / "model"), *options, *more, "--", *serve)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """The stand-in's model is no checkpoint; the check has tests of its own."""
    monkeypatch.setattr("onebox.cli.scaleout_launch._refuse_unloadable", lambda *_: [])


def test_a_dry_run_prints_both_commands_with_a_reason_for_every_variable(boxes, run_cli):
    result = run_cli(*arguments(boxes, "--dry-run"))
    assert result.code == 0, result.err
    head, worker = result.out.split("# node 1 on spark-2")
    assert "export NCCL_IB_HCA=rocep1s0f1,roceP2p1s0f1  # both twins" in head
    assert "export VLLM_HOST_IP=192.168.177.12" in worker
    for text, rank in ((head, 0), (worker, 1)):
        assert f"--node-rank {rank}" in text
        assert "--nnodes 2" in text
        assert "--master-addr 192.168.177.11" in text
        assert "--max-model-len 2048" in text
    assert "--headless" in worker
    assert "--headless" not in head
    assert "--port 8000" in head
    assert "--port" not in worker.replace("--master-port", "")
    assert all("  # " in line for line in result.out.splitlines() if line.startswith("export "))
    assert not (boxes / "spark-1" / "started.json").exists()


def test_one_host_needs_no_addresses(boxes, run_cli, monkeypatch):
    monkeypatch.setenv("STANDIN_HOST", "spark-1")
    result = run_cli("scaleout", "launch", boxes / "model", "--tp", "2", "--dry-run")
    assert result.code == 0, result.err
    assert "--tensor-parallel-size 2" in result.out
    assert "--nnodes" not in result.out
    assert "export" not in result.out


def test_a_server_for_other_machines_needs_a_key_which_is_not_shown(boxes, run_cli):
    base = ("scaleout", "launch", boxes / "model", "--hosts", "spark-1,spark-2", "--tp", "2", "--dry-run", "--sysfs")
    refused = run_cli(*base, boxes / "sys")
    assert refused.code == 2
    assert "no API key" in refused.err
    result = run_cli(*base, boxes / "sys", "--", "--api-key", "sesame")
    assert result.code == 0
    assert "sesame" not in result.out
    assert "--host 192.168.177.11" in result.out


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        ("spark-1,down-2", "down-2 cannot be reached by ssh: ssh: connect to host down-2 port 22: No route to host"),
        ("spark-1,spark-1", "no list of different hosts"),
    ],
)
def test_hosts_that_cannot_be_used_are_refused_in_a_sentence(boxes, run_cli, hosts, told):
    result = run_cli("scaleout", "launch", boxes / "model", "--hosts", hosts, "--tp", "2", "--dry-run")
    assert result.code == 2
    assert told in result.err


def test_a_host_without_the_model_is_named(boxes, run_cli):
    result = run_cli("scaleout", "launch", boxes / "nothing", "--hosts", "spark-1,spark-2", "--tp", "2", "--dry-run")
    assert result.code == 1
    assert "spark-1, spark-2" in result.err
    assert "is not there" in result.err


def test_three_ranks_on_two_hosts_are_refused(boxes, run_cli):
    result = run_cli("scaleout", "launch", boxes / "model", "--hosts", "spark-1,spark-2", "--tp", "3", "--dry-run")
    assert result.code == 2


def until(condition, what):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture
def start(boxes):
    """Starts a launch in a process of its own; gives it, and the pids of both nodes once it is ready."""
    running = []

    def started(*more, is_ready=True):
        code = (
            "import sys; import onebox.cli.scaleout_launch as command; command._refuse_unloadable = lambda *_: [];"
            "from onebox.cli.main import main; main()"
        )
        words = [sys.executable, "-c", code, *map(str, arguments(boxes, *more, port=free_ports(1)[0]))]
        with (boxes / "log").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        running.append(process)
        if is_ready:
            until(lambda: process.poll() is not None or "Ready after" in (boxes / "log").read_text(), "not ready")
            assert process.poll() is None, (boxes / "log").read_text()
            # The head may answer before the other node has begun.
            until(lambda: all(has_worker(boxes / host) for host in ("spark-1", "spark-2")), "no workers")
        return process

    yield started
    for process in running:
        process.kill()
        process.wait()


def has_worker(host):
    return (host / "worker.pid").exists() and (host / "worker.pid").read_text().isdigit()


def pids(root):
    mains = [json.loads((root / host / "started.json").read_text())["pid"] for host in ("spark-1", "spark-2")]
    return mains + [int((root / host / "worker.pid").read_text()) for host in ("spark-1", "spark-2")]


def test_a_killed_node_is_named_and_the_other_is_stopped(boxes, start):
    process = start("--env", "NCCL_DEBUG=INFO")
    nodes = pids(boxes)
    found = json.loads((boxes / "spark-2" / "started.json").read_text())
    assert found["environment"]["NCCL_DEBUG"] == "INFO"
    assert found["words"][:2] == ["serve", str(boxes / "model")]
    os.kill(nodes[1], signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 1
    text = (boxes / "log").read_text()
    assert "onebox: Node 1 on spark-2 was killed by SIGKILL while it served. All nodes are stopped." in text
    # The killed node's worker too, which had outlived it.
    until(lambda: not any(map(is_running, nodes)), f"of {nodes} some are still there")


def test_ctrl_c_stops_all_nodes(boxes, start):
    process = start()
    nodes = pids(boxes)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    until(lambda: not any(map(is_running, nodes)), f"of {nodes} some are still there")


def test_nodes_end_when_the_launch_itself_is_killed(boxes, start):
    process = start()
    nodes = pids(boxes)
    process.kill()
    until(lambda: not any(map(is_running, nodes)), f"of {nodes} some are still there")


def test_a_node_that_fails_to_start_gives_its_reason_in_one_sentence(boxes, start):
    """Not a traceback, and not the error that follows from it."""
    (boxes / "spark-2" / "fails").write_text("")
    process = start(is_ready=False)
    assert process.wait(PATIENCE_S) == 1
    told = [line for line in (boxes / "log").read_text().splitlines() if line.startswith("onebox: ")]
    # The stand-in's head may answer before that.
    told = [line.replace("while it served", "before it served") for line in told]
    reason = "Node 1 on spark-2 ended with status 1 before it served: AssertionError: the reason."
    assert told == [f"onebox: {reason} All nodes are stopped."]


def test_a_program_that_is_not_there_is_named(boxes, start):
    process = start("--program", "no-such-vllm --flag", is_ready=False)
    assert process.wait(PATIENCE_S) == 1
    told = [line for line in (boxes / "log").read_text().splitlines() if line.startswith("onebox: ")]
    # Whichever is found first.
    told = [line.replace("Node 1 on spark-2", "Node 0 on spark-1") for line in told]
    reason = "no-such-vllm cannot be run there; install vLLM, or name its program with --program."
    assert told == [f"onebox: Node 0 on spark-1: {reason} All nodes are stopped."]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], None),
        (["ERROR WARNING [utils.py:1] This can cause an OSError: [Errno 24] Too many open files"], None),
        (
            ["ERROR [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB", "RuntimeError: later"],
            "OutOfMemoryError: CUDA out of memory. Tried 2 GiB (give --gpu-memory-utilization 0.80 or a smaller "
            "--max-model-len)",
        ),
        (
            ["ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down.", "RuntimeError: later"],
            "its worker VllmWorker-1 died (SIGKILL)",
        ),
        (["ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: None)"], "its worker VllmWorker-1 died"),
    ],
)
def test_the_root_of_a_failure_is_found_in_the_output(lines, cause):
    assert failure_cause(lines) == cause
