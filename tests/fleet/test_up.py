"""`onebox fleet up` as a process: what it refuses before it starts anything, and that nothing outlives it."""

import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from onebox.fleet.process import free_ports
from tests.fleet.conftest import HTTP, STEP_S, is_healthy, wait_until, write_config

UP = [sys.executable, "-m", "onebox.cli.main", "fleet", "up", "--config"]


def status_of(config):
    return HTTP.get(f"{config.admin_url}/status").json()


def answers(url):
    """Whether anything listens there."""
    try:
        return bool(HTTP.get(f"{url}/health").status_code)
    except httpx.HTTPError:
        return False


@pytest.fixture
def rolling(nursery, tmp_path):
    """(config, process, answer) of a fleet of one member that is being replaced: the old server has to finish it."""
    config = write_config(tmp_path / "fleet.toml", [{"name": "a", "start": nursery.start_line(step_s=STEP_S)}])
    process = subprocess.Popen([*UP, config.path], stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("Ready: ") for line in process.stdout)
        asking = ThreadPoolExecutor(1).submit(ask_long, config.url)
        wait_until(lambda: status_of(config)["members"][0]["num_open"])
        HTTP.post(f"{config.admin_url}/roll", headers={"x-onebox-fleet": "1"})
        yield config, process, asking
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask_long(url):
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False).text


def test_a_second_ctrl_c_ends_everything_at_once_also_what_is_being_replaced(rolling):
    config, process, asking = rolling
    old = status_of(config)["members"][0]["url"]
    wait_until(lambda: any("takes the traffic" in line for line in status_of(config)["roll"]["lines"]))
    new = status_of(config)["members"][0]["url"]
    assert is_healthy(old)
    assert is_healthy(new)
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("Stopping: ") for line in process.stdout)
    assert is_healthy(old)  # it has its answer to finish
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "The answer broke off: a does not go on: the fleet was ended." in asking.result()
    wait_until(lambda: not any(map(answers, (old, new, config.url))))


def test_a_port_that_is_taken_is_refused_before_a_member_starts(run_cli, tmp_path):
    (taken,) = free_ports(1)
    mark = tmp_path / "started"
    start = f"sh -c {shlex.quote(f'touch {mark}; sleep 60')} {{port}}"
    for name in ("port", "admin_port"):
        write_config(tmp_path / "fleet.toml", [{"name": "a", "start": start}], **{name: taken})
        with socket.create_server(("127.0.0.1", taken)):
            result = run_cli("fleet", "up", "--config", tmp_path / "fleet.toml")
        assert result.code == 1
        assert f"Port {taken} on 127.0.0.1 cannot be had" in result.err
    assert not mark.exists()


def test_a_router_that_is_not_there_is_refused_before_a_member_starts(run_cli, tmp_path):
    mark = tmp_path / "started"
    start = f"sh -c {shlex.quote(f'touch {mark}; sleep 60')} {{port}}"
    write_config(tmp_path / "fleet.toml", [{"name": "a", "start": start}], router="litellm")
    result = run_cli("fleet", "up", "--config", tmp_path / "fleet.toml")
    assert result.code == 2
    assert "LiteLLM does not start without a key" in result.err
    assert not mark.exists()


def test_open_members_are_not_put_behind_an_address_for_other_machines(run_cli, nursery, tmp_path):
    (port,) = free_ports(1)
    nursery.start(port)
    member = {"name": "a", "url": f"http://127.0.0.1:{port}"}
    write_config(tmp_path / "fleet.toml", [member], host="0.0.0.0")  # noqa: S104 - refused
    for more in ((), ("--check",)):
        result = run_cli("fleet", "up", "--config", tmp_path / "fleet.toml", *more)
        assert result.code == 2
        assert "lets other machines call a, which asks for no API key" in result.err


def test_a_check_shows_who_answers_and_names_who_does_not(run_cli, nursery, tmp_path):
    port, nobody = free_ports(2)
    nursery.start(port, version="3.1")
    members = [
        {"name": "away", "url": f"http://127.0.0.1:{nobody}"},
        {"name": "here", "url": f"http://127.0.0.1:{port}"},
        {"name": "own", "start": "onebox serve --port {port}"},
    ]
    write_config(tmp_path / "fleet.toml", members)
    result = run_cli("fleet", "up", "--check", "--config", tmp_path / "fleet.toml")
    assert result.code == 1
    assert "3.1" in next(line for line in result.out.splitlines() if line.startswith("here"))
    assert "own is not running; `onebox fleet up` starts and checks it." in result.out
    assert f"away: http://127.0.0.1:{nobody}/v1/models cannot be asked" in result.err
    write_config(tmp_path / "fleet.toml", members[1:])
    assert run_cli("fleet", "up", "--check", "--config", tmp_path / "fleet.toml").code == 0


def test_the_log_that_an_error_names_is_kept(run_cli, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    member = {"name": "a", "start": "sh -c 'echo first; echo no such model; exit 3; {port}'"}
    write_config(tmp_path / "fleet.toml", [member])
    result = run_cli("fleet", "up", "--config", tmp_path / "fleet.toml")
    assert result.code == 1
    assert "a ended with status 3: no such model" in result.err
    (log,) = tmp_path.glob("*/a-*.log")
    assert str(log) in result.err
    assert log.read_text() == "first\nno such model\n"
