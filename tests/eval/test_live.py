"""`onebox eval` against `onebox serve`, held against what is known: a model is itself, a damaged one is not."""

import json
import re
import shutil
import sys
import time

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from onebox.eval.passages import shipped_passages
from onebox.eval.target import opened
from onebox.pocket.ready import pocket_checkpoint
from tests.server.launching import launched


@pytest.fixture(scope="module")
def url():
    with launched() as address:
        yield address


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Ten short passages, as --text takes them: enough to tell a difference, and soon predicted."""
    directory = tmp_path_factory.mktemp("texts")
    arguments = []
    for passage in [one for one in shipped_passages() if one.kind in ("en", "hu", "tr")][:10]:
        path = directory / f"{passage.id.replace('/', '-')}.txt"
        path.write_text(passage.text[:160])
        arguments += ["--text", path]
    return arguments


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The served build with noise on its final norm: every prediction is a little off, and nothing else is wrong."""
    directory = tmp_path_factory.mktemp("damaged") / "pocket-damaged"
    shutil.copytree(pocket_checkpoint(), directory)
    changed = 0
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("language_model.norm.weight"):
                noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
                tensors[name] = (tensors[name] * (1 + 0.35 * noise)).to(tensors[name].dtype)
                changed += 1
        save_file(tensors, path, {"format": "pt"})
    assert changed == 1
    return directory


def test_a_server_held_against_itself_shows_no_difference(run_cli, url, texts, tmp_path):
    output = tmp_path / "same.json"
    checks = ("--checks", "tools,schema,likelihood", "--count", "5", "--output", output)
    result = run_cli("eval", url, url, *checks, *texts)
    assert result.code == 0, result.out + result.err
    assert "Verdict: no difference seen" in result.out
    found = json.loads(output.read_text())
    texts_found = found["comparison"]["texts"]
    assert texts_found["divergence"]["estimate"] == 0
    assert texts_found["same_likeliest"]["estimate"] == 1
    assert found["comparison"]["pairs"][-1]["same_text"] == 10
    # The pocket model reads invoices and calls tools: a harness that scores it at nothing would be at fault.
    assert found["tallies"][0][-1]["right"] >= 3
    report = run_cli("report", output, "--output", tmp_path / "same.html")
    assert report.code == 0, report.err
    assert "No difference seen on 10 answers" in (tmp_path / "same.html").read_text()


def test_a_damaged_build_is_told_apart_and_its_server_is_stopped(run_cli, url, texts, damaged, tmp_path):
    output = tmp_path / "damaged.json"
    options = ("--checks", "likelihood", "--serve-b", "--max-model-len 2048", "--output", output)
    result = run_cli("eval", url, damaged, *options, *texts)
    assert result.code == 3, result.out + result.err
    assert "Verdict: B is worse" in result.out
    found = json.loads(output.read_text())
    texts_found = found["comparison"]["texts"]
    assert texts_found["perplexity_ratio"]["low"] > 1
    assert texts_found["divergence"]["low"] > 0
    server = found["sides"][1]["server"]
    assert (server["model"], server["max_model_len"]) == ("pocket-damaged", 2048)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server['url']}/health")


def test_perplexity_is_that_of_the_servers_own_log_probabilities(run_cli, url, texts, tmp_path):
    """Against the older form of the same server, which is asked for without any code of ours."""
    output = tmp_path / "one.json"
    assert run_cli("eval", url, "--checks", "likelihood", "--output", output, *texts).code == 0
    found = json.loads(output.read_text())
    total, count = 0.0, 0
    for passage in found["passages"]:
        body = {"prompt": passage["text"], "max_tokens": 0, "echo": True, "logprobs": 0}
        table = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
        total -= sum(table["token_logprobs"][1:])
        count += len(table["token_logprobs"]) - 1
    told = found["texts"][0]
    assert told["tokens"] == count
    assert torch.tensor(told["perplexity"]["estimate"]).log().item() == pytest.approx(total / count, abs=1e-4)


def test_hidden_keys_have_their_length_in_the_servers_tokens(run_cli, url, tmp_path):
    output = tmp_path / "keys.json"
    result = run_cli("eval", url, "--checks", "keys", "--lengths", "512", "--repeats", "1", "--output", output)
    assert result.code == 0, result.err
    found = json.loads(output.read_text())
    lengths = [reply["answer"]["prompt_tokens"] for reply in found["sides"][0]["replies"]]
    assert len(lengths) == 3
    assert all(350 < length <= 512 for length in lengths), lengths
    assert found["tallies"][0][-1]["right"] >= 2
    assert re.search(r"keys +[23] +3", result.out)


def test_an_address_is_taken_as_it_is():
    with opened("http://example.org:1/v1") as address:
        assert address == "http://example.org:1/v1"


def test_a_server_may_write_more_than_a_pipe_holds(tmp_path, monkeypatch):
    """A server that logs while it serves must not stop because nobody reads it."""
    script = tmp_path / "python"
    written = tmp_path / "written"
    script.write_text(
        f"#!{sys.executable}\nimport time\nprint('Ready in 1 s at http://127.0.0.1:1/v1', flush=True)\n"
        f"for _ in range(3000): print('x' * 99, flush=True)\nopen({str(written)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("onebox.eval.target.sys.executable", str(script))
    with opened("pocket") as address:
        assert address == "http://127.0.0.1:1"
        end = time.monotonic() + 30
        while not written.exists():
            assert time.monotonic() < end, "the server waits for its output to be read"
            time.sleep(0.02)
