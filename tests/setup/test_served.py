"""`onebox up` from nothing to an answer: the pocket model fetched from a hub, built, verified and served."""

import os
import re
import signal
import subprocess
import sys
import threading

import httpx

from onebox.pocket.ready import MODEL_DIRECTORY

RECIPE = """
model = "pocket"
[sources]
base = "onebox/pocket"
[build]
experts = "int4"
attention = "fp8"
shared = "fp8"
lm_head = "int8"
mtp = "int4"
[serve]
max_model_len = 2048
max_num_seqs = 1
served_model_name = "little"
"""
START_LIMIT_S = 300


def ask(url: str) -> str:
    body = {"model": "little", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def test_from_nothing_to_an_answer(small_hub, nursery, tmp_path):
    small_hub.add("onebox/pocket", MODEL_DIRECTORY)
    (tmp_path / "mine.toml").write_text(RECIPE)
    up = ("up", "pocket", "--recipe", "mine.toml")
    command = [sys.executable, "-m", "onebox.cli.main", *up, "--", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, **small_hub.environment(tmp_path / "home"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(START_LIMIT_S, process.kill)
        limit.start()
        try:
            ready = next((line for line in process.stdout or () if line.startswith("Ready")), "")
            [url] = re.findall(r": little at (http\S+)/v1", ready)
            assert re.search("hello|hi|help", ask(url), re.IGNORECASE)
            refused = nursery.run(tmp_path, *up, "--no-serve")
        finally:
            limit.cancel()
            process.kill()
    assert refused.code == 1
    assert f"(process {process.pid}, step serve)" in refused.err
    assert process.returncode == -signal.SIGKILL
    after = nursery.run(tmp_path, *up, "--no-serve", "--", "--device", "cpu")
    assert (after.code, after.redone) == (0, {"check"})
