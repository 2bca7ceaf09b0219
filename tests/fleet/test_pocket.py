"""`onebox fleet up` as its users start it, over three servers of the pocket model: too slow for `make test`."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.fleet.conftest import HTTP, is_healthy, wait_until, write_config

pytestmark = pytest.mark.fleet
ONEBOX = [sys.executable, "-m", "onebox.cli.main"]
SERVE = (
    f"{' '.join(ONEBOX)} serve --port {{port}} --max-num-seqs 4 --max-model-len 2048 --kv-cache-memory-bytes 33554432"
)


def run(*arguments):
    return subprocess.run([*ONEBOX, "fleet", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_a_fleet_of_pocket_models_serves_is_rolled_and_ends_with_ctrl_c(tmp_path):
    path = tmp_path / "fleet.toml"
    members = [{"name": name, "start": SERVE} for name in "abc"]
    config = write_config(path, members, start_s=300, hang_s=20)
    with subprocess.Popen([*ONEBOX, "fleet", "up", "--config", path], stdout=subprocess.PIPE, text=True) as up:
        try:
            assert any(line.startswith("Ready: vllm-router") for line in up.stdout)
            status = json.loads(run("status", "--config", path, "--json").stdout)
            assert [member["state"] for member in status["members"]] == ["up"] * 3
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            assert HTTP.post(f"{config.url}/v1/chat/completions", json=body).status_code == 200
            assert "a is drained. Nothing is running on it." in run("drain", "a", "--config", path).stdout
            assert "a takes requests again." in run("drain", "a", "--undo", "--config", path).stdout
            rolled = run("roll", "b", "--config", path)
            assert rolled.returncode == 0, rolled.stdout
            assert "b: replaced" in rolled.stdout
            assert "onebox fleet" in HTTP.get(f"{config.admin_url}/").text
            relays = [member["relay_url"] for member in status["members"]]
            measured = run("simulate", *(f"--measure={url}" for url in relays), "--boxes=3", "--json", "--seconds=60")
            steps = json.loads(measured.stdout)["steps"]
            assert list(steps["slowdowns"]) == ["2", "3"]
            assert 0 < steps["decode_s"]["1"] < 10
            urls = [member["url"] for member in json.loads(run("status", "--config", path, "--json").stdout)["members"]]
            os.kill(up.pid, signal.SIGINT)
            assert up.wait(60) == 0
            wait_until(lambda: not any(is_healthy(url) for url in [*urls, config.url]))
        finally:
            up.kill()
    gone = run("status", "--config", path)
    assert (gone.returncode, "No fleet answers" in gone.stderr) == (1, True)
