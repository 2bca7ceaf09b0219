"""`onebox bench` as its users meet it: tables, exit status, records, and servers that misbehave."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from onebox.bench import meter
from onebox.bench.record import read_run
from onebox.sensors import SensorReading
from tests.bench.faulty import faulty
from tests.server.conftest import listening, make_service, tiny

__all__ = ["make_service", "tiny"]

QUICK = ("--runs", "2", "--seed", "7", "--idle", "0")


def test_a_good_run_is_a_table_a_record_and_status_0(run_cli, tmp_path):
    record = tmp_path / "run.json"
    with faulty(drafts_in_usage=True) as server:
        result = run_cli("bench", "run", "--url", server.url, "--workloads", "qa,vision", *QUICK, "--output", record)
    assert result.code == 0, result.err
    assert "FAILED" not in result.out
    row = next(line for line in result.out.splitlines() if line.startswith("Q&A"))
    assert row.split()[1:3] == ["64", "12"]
    assert "Vision/OCR: skipped, the server takes no images" in result.out
    assert "All 5 requests were answered completely" in result.out
    run = read_run(record)
    assert run.is_success
    assert run.command[:3] == ("onebox", "bench", "run")
    again = run_cli("bench", "show", record)
    assert again.code == 0
    assert again.out.splitlines() == result.out.splitlines()[:-1]  # all but where the record is
    compared = run_cli("bench", "--compare", record, record)
    assert compared == run_cli("bench", "compare", record, record)
    assert compared.out.startswith("A ")


@pytest.mark.parametrize("fault", ["400", "500", "cut", "duplicates", "overstated", "error event"])
def test_a_faulty_server_never_looks_like_a_success(run_cli, tmp_path, fault):
    record = tmp_path / "run.json"
    names = {
        "400": "refused",
        "500": "server error",
        "cut": "cut stream",
        "duplicates": "duplicate chunks",
        "overstated": "wrong usage",
        "error event": "error in the stream",
    }
    with faulty(fault) as server:
        options = (
            "--url",
            server.url,
            "--mixes",
            "uniform_short",
            "--count",
            "4",
            "--warm-ups",
            "0",
            "--output",
            record,
            "--json",
        )
        result = run_cli("bench", "load", *options)
    assert result.code == 1
    told = json.loads(result.out)
    assert (told["success"], told["failed"], told["requests"]) == (False, 4, 4)
    assert told["failures"][0]["reason"] == names[fault]
    assert len(read_run(record).failed) == 4
    assert "tok/s" not in result.err


def test_one_failure_among_many_is_enough(run_cli):
    with faulty(fault_of=lambda number: "500" if number == 5 else "") as server:
        result = run_cli(
            "bench", "load", "--url", server.url, "--mixes", "uniform_short", "--count", "12", "--warm-ups", "0"
        )
    assert result.code == 1
    assert result.out.splitlines()[0] == "FAILED: 1 of 12 requests."
    assert "a scripted 500" in result.out
    assert "do not represent this server" in result.out.splitlines()[-1]


def test_json_is_alone_on_stdout_where_it_is_asked_for(run_cli):
    with faulty() as server:
        result = run_cli("bench", "run", "--url", server.url, "--workloads", "math", *QUICK, "--json")
    told = json.loads(result.out)
    assert told["success"] is True
    assert told["workloads"][0]["figures"]["prompt_tokens"] == 96


def test_a_sweep_and_a_load_are_exported_in_the_neighbours_forms(run_cli, tmp_path):
    with faulty() as server:
        common = ("--url", server.url, "--seed", "1", "--idle", "0")
        sizes = ("--pp", "64", "--tg", "8", "--depth", "0,128", "--runs", "2")
        assert run_cli("bench", "sweep", *common, *sizes, "--output", tmp_path / "sweep.json").code == 0
        loads = ("--mixes", "uniform_short", "--count", "5", "--rate", "100")
        assert run_cli("bench", "load", *common, *loads, "--output", tmp_path / "load.json").code == 0
    assert run_cli("bench", "export", "llama-benchy", tmp_path / "sweep.json", tmp_path / "benchy.json").code == 0
    benchy = json.loads((tmp_path / "benchy.json").read_text())
    phases = [(row["context_size"], row["is_context_prefill_phase"]) for row in benchy["benchmarks"]]
    assert phases == [(0, False), (128, True), (128, False)]
    assert run_cli("bench", "export", "vllm-bench", tmp_path / "load.json", tmp_path / "vllm.json").code == 0
    vllm = json.loads((tmp_path / "vllm.json").read_text())
    assert (vllm["completed"], vllm["failed"], vllm["request_rate"]) == (5, 0, 100.0)
    for form, record, words in (
        ("llama-benchy", "load.json", "this run has none"),
        ("vllm-bench", "sweep.json", "this run has none"),
        ("csv", "load.json", "There is no format 'csv'"),
    ):
        refused = run_cli("bench", "export", form, tmp_path / record, tmp_path / "x.json")
        assert refused.code == 2
        assert words in refused.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--workloads", "poetry"), "There is no workload 'poetry'"),
        (("run", "--url", "ftp://x"), "--url is 'ftp://x'"),
        (("run", "--output", "/no/such/directory/x.json"), "cannot be written"),
        (("run", "--api-key", "schlüssel"), "which no header carries"),
        (("load", "--mixes", "all,of,it"), "There is no mix 'all'"),
        (("load", "--count", "3", "--duration", "4"), "either --count or --duration"),
        (("load", "--rate", "fast"), "--rate is 'fast'"),
        (("load", "--slo", "quick"), "--slo holds 'quick'"),
        (("load", "--concurrency", "0"), "--concurrency is '0'"),
        (("sweep", "--pp", "many"), "--pp is 'many'"),
        (("run", "--launch", "/no/such/server", "--url", "127.0.0.1:9"), "cannot be started"),
        (("show", "/no/such/file"), "cannot be read"),
    ],
)
def test_wrong_arguments_are_one_sentence(run_cli, arguments, words):
    result = run_cli("bench", *arguments)
    assert result.code == 2
    assert words in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


def test_no_server_is_one_sentence(run_cli):
    result = run_cli("bench", "run", "--url", "127.0.0.1:9")
    assert result.code == 1
    assert result.err.startswith("onebox: No server answers at http://127.0.0.1:9")


def test_ctrl_c_keeps_what_was_measured_and_says_that_it_is_not_whole(tmp_path):
    record = tmp_path / "run.json"
    with faulty(chunk_delay_s=0.02) as server:
        options = ["--url", server.url, "--workloads", "qa", "--runs", "1000", "--output", str(record)]
        command = [sys.executable, "-m", "onebox.cli.main", "bench", "run", *options]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ}) as process:
            limit = time.monotonic() + 120
            while len(server.bodies) < 4 and time.monotonic() < limit:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out.startswith("INTERRUPTED: this run is incomplete.")
    run = read_run(record)
    assert run.interrupted
    assert len(run.workloads[0].requests) >= 3


BLOCKED = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["tokenizers"] = None  # importing them fails
from onebox.cli.main import main
main()
"""


def test_it_runs_where_there_is_no_torch():
    with faulty() as server:
        command = [sys.executable, "-c", BLOCKED, "bench", "run", "--url", server.url, "--workloads", "math", *QUICK]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "All 5 requests were answered completely" in done.stdout


def test_it_measures_onebox_itself(run_cli, tiny, tmp_path):
    """The real server with a tiny random model, whose context is small: prompts are scaled and stay exact."""
    record = tmp_path / "run.json"
    with listening(tiny.app) as url:
        options = ("--workloads", "qa,tools", "--ignore-eos", "--max-context", "256", "--runs", "1", "--idle", "0")
        result = run_cli("bench", "run", "--url", url, *options, "--output", record)
    assert result.code == 0, result.out + result.err
    run = read_run(record)
    assert (run.server.kind, run.server.gives_token_ids, run.server.tokenizer) == ("onebox", True, "vllm")
    first, tools = run.workloads
    # Its tokens are nearly letters, so the question alone is longer than its 64 tokens: the answer gives way.
    (length,) = {request.prompt_tokens for request in first.requests}
    assert 64 < length < 240
    assert {request.completion_tokens for request in first.measured if request.role == "cold"} == {256 - length}
    assert f"the answer is cut to {256 - length} tokens from 256" in first.notes[0]
    assert re.fullmatch(r"its prompt has 1,\d+ tokens and the context holds 256", tools.skipped)
    assert all(request.completion_tokens == sum(request.arrival_tokens) for request in first.measured)


def test_watts_heat_and_cost_are_shown_where_the_machine_tells_them(run_cli, tmp_path, monkeypatch):
    """A machine whose GPU draws 100 W and whose box draws 180 W."""
    monkeypatch.setattr(meter.Meter.__init__, "__defaults__", (steady_reading, 0.05))
    record = tmp_path / "run.json"
    prices = ("--price-kwh", "0.30", "--price-hardware", "4000", "--price-api", "10")
    with faulty(chunk_delay_s=0.02, answer_tokens=24) as server:
        options = ("--url", server.url, "--workloads", "qa", "--runs", "2", "--idle", "1.1", *prices)
        shown = run_cli("bench", "run", *options, "--output", record)
    assert shown.code == 0, shown.err
    assert "power: box mean 180.0 W, peak 180.0, idle 180.0; GPU 0 mean 100.0 W" in shown.out
    assert "throttled: GPU 0: any in 100% of the samples; GPU 0: software power cap in 100%" in shown.out
    assert "server's CPU: idle" in shown.out
    run = read_run(record)
    assert run.power.mean_w == 100
    (workload,) = run.workloads
    made = sum(request.completion_tokens for request in workload.measured)
    assert workload.figures["box_j_per_token"] == pytest.approx(180 * workload.duration_s / made, rel=1e-6)
    energy = workload.figures["box_j_per_token"] / 3.6 * 0.30
    row = next(line for line in shown.out.splitlines() if line.startswith("Q&A") and "box" in line)
    assert f"{energy:.4g}" in row.split()
    # Other prices, without measuring again.
    again = run_cli("bench", "show", record, "--price-kwh", "0.60")
    assert f"{2 * energy:.4g}" in again.out
    page = run_cli("report", record, "--output", tmp_path / "report.html")
    assert page.code == 0, page.err
    assert "Power and heat" in (tmp_path / "report.html").read_text()


def test_a_price_without_watts_is_said(run_cli, monkeypatch):
    monkeypatch.setattr(meter.Meter.__init__, "__defaults__", (lambda: SensorReading(time.perf_counter()), 0.05))
    with faulty() as server:
        options = ("--url", server.url, "--workloads", "math", *QUICK, "--price-kwh", "0.3", "--price-hardware", "4000")
        shown = run_cli("bench", "run", *options)
    assert shown.code == 0, shown.err
    assert "no cost of energy: no sensor of the server's machine tells its watts" in shown.out
    assert "J/token" not in shown.out
    assert "hardware" in shown.out


def steady_reading():
    return SensorReading(
        time.perf_counter(),
        {"box": 180.0, "GPU 0": 100.0},
        {"GPU 0": 64.0},
        {"GPU 0 SM": 2100.0},
        {"GPU 0: any": True, "GPU 0: software power cap": True},
    )
