"""Records in the neighbours' forms. llama-benchy's own reader judges, too, under `make conformance-test`."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from onebox.bench.export import as_llama_benchy, as_vllm_bench
from onebox.bench.figures import CONTEXT_LABEL, figures
from onebox.bench.record import (
    Acceptance,
    Failure,
    Hardware,
    Reason,
    RequestRecord,
    Role,
    Run,
    Server,
    WorkloadKind,
    WorkloadRecord,
    write_json,
    write_run,
)
from onebox.spec.errors import UsageError
from tests.bench.benchy import COMPUTE, GOLDEN, as_input, recorded_cells

BENCHY_PYTHON = Path(__file__).parents[2] / ".venv-conformance" / "bin" / "python"

REQUEST = RequestRecord(Role.LOAD, 0.0, 2.1, (1.0, 1.5, 2.0), (2, 4, 4), 100, 10, "usage", label="cell")
LATER = replace(REQUEST, start_s=0.5, arrivals_s=(2.0, 2.5, 3.5), total_s=3.6)


def run_of(*workloads):
    made = tuple(replace(workload, figures=figures(workload)) for workload in workloads)
    server = Server("http://h:1", "tiny")
    return Run("2026-11-15T10:00:00+00:00", (), {}, {"onebox": "0.1.0"}, Hardware("c", 2, 1), server, workloads=made)


def cell(depth, concurrency, *requests):
    settings = {"prompt": 64, "answer": 10, "depth": depth, "concurrency": concurrency}
    return WorkloadRecord(f"d{depth} c{concurrency}", WorkloadKind.SWEEP, settings, requests, 4.0)


SWEEP = run_of(
    cell(0, 1, REQUEST, replace(REQUEST, run=1, arrivals_s=(0.5, 1.0, 1.25))),
    cell(256, 2, replace(REQUEST, label=CONTEXT_LABEL, arrivals_s=(0.5,), arrival_tokens=(1,)), REQUEST, LATER),
)
LOAD = WorkloadRecord(
    "mix",
    WorkloadKind.LOAD,
    {"concurrency": 2, "rate": None},
    (REQUEST, LATER, replace(REQUEST, failure=Failure(Reason.CUT, "It broke."))),
    4.1,
    acceptance=Acceptance(12, 16, 2.5, "usage", 8, (1.0, 0.5)),
)


def test_a_cell_is_llama_benchys_run_with_the_context_as_a_phase_of_its_own():
    made = as_llama_benchy(SWEEP)
    alone, load, together = made["benchmarks"]
    assert (made["model"], made["max_concurrency"], made["prefix_caching_enabled"]) == ("tiny", 2, True)
    assert [row["is_context_prefill_phase"] for row in made["benchmarks"]] == [False, True, False]
    assert alone["tg_throughput"]["values"] == pytest.approx([8.0, 8 / 0.75])
    assert alone["tg_throughput"]["mean"] == pytest.approx(numpy.mean([8.0, 8 / 0.75]))
    assert alone["tg_throughput"]["std"] == pytest.approx(numpy.std([8.0, 8 / 0.75]))
    assert alone["pp_throughput"]["values"] == pytest.approx([64.0, 128.0])
    assert alone["ttfr"]["values"] == pytest.approx([1000.0, 500.0])
    assert load["pp_throughput"]["values"] == pytest.approx([512.0])
    assert load["tg_throughput"] is None
    # Two at once: 128 prompt tokens until the later first chunk at 2.5 s, 16 tokens from 1 s to 4 s.
    assert together["pp_throughput"]["values"] == pytest.approx([128 / 2.5])
    assert together["tg_throughput"]["values"] == pytest.approx([16 / 3.0])
    assert together["tg_req_throughput"]["values"] == pytest.approx([8.0, 8 / 1.5])
    # A delivery's tokens are spread over the time since the one before. Within the second up to 1.875 s came the two
    # of the first delivery, the four of the second and three of the last.
    assert together["peak_req_throughput"]["values"][0] == pytest.approx(9.0)


def test_a_load_is_vllm_benchs_result_with_its_failures():
    made = as_vllm_bench(run_of(LOAD))
    assert (made["completed"], made["failed"], made["num_prompts"]) == (2, 1, 3)
    assert (made["total_input_tokens"], made["total_output_tokens"]) == (200, 20)
    assert made["output_throughput"] == pytest.approx(20 / 4.1)
    assert made["ttfts"] == [1.0, 2.0, 1.0]
    assert made["itls"][1] == pytest.approx([0.5, 1.0])
    assert made["errors"] == ["", "", "cut stream: It broke."]
    assert made["output_lens"] == [10, 10, 0]
    first = numpy.array([1000.0, 2000.0])
    assert made["mean_ttft_ms"] == pytest.approx(first.mean())
    assert made["p99_ttft_ms"] == pytest.approx(numpy.percentile(first, 99))
    assert made["std_itl_ms"] == pytest.approx(numpy.std([500, 500, 500, 1000]))
    assert made["max_concurrent_requests"] == 3
    assert made["spec_decode_acceptance_rate"] == pytest.approx(75.0)
    assert made["spec_decode_acceptance_length"] == pytest.approx(1 + 12 / 8)
    assert made["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]


def test_one_of_several_loads_has_to_be_named():
    both = run_of(LOAD, replace(LOAD, name="other"))
    assert as_vllm_bench(both, "other")["label"] == "other"
    with pytest.raises(UsageError, match="name one with --load: mix, other"):
        as_vllm_bench(both)
    with pytest.raises(UsageError, match="this run has none"):
        as_vllm_bench(SWEEP)
    with pytest.raises(UsageError, match="this run has none"):
        as_llama_benchy(both)


def test_the_table_of_a_sweep_is_llama_benchys():
    """The golden file is llama-benchy's own computation over the same recorded times."""
    golden, cells = json.loads(GOLDEN.read_text()), recorded_cells()
    ours = as_llama_benchy(run_of(*cells))["benchmarks"]
    assert len(ours) == len(golden["runs"]) == 5
    for mine, theirs in zip(ours, golden["runs"], strict=True):
        for name, value in theirs.items():
            if name.startswith("peak") and theirs["is_context_prefill_phase"]:
                assert mine[name] is None  # an answer of one token has no peak, whatever one divides by
            elif isinstance(value, dict):
                for key in value:
                    assert mine[name][key] == pytest.approx(value[key], rel=1e-9), (name, key)
            else:
                assert mine[name] == value, name


def test_the_printed_table_of_a_sweep_has_llama_benchys_rows_and_columns(run_cli, tmp_path):
    write_run(run_of(*recorded_cells()), tmp_path / "run.json")
    shown = run_cli("bench", "show", tmp_path / "run.json")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith(("sweep", "     ")) and "ttfr" in line)
    assert re.findall(r"t/s|peak t/s|ttfr|est_ppt|e2e_ttft", lines[head])[-3:] == ["ttfr", "est_ppt", "e2e_ttft"]
    for name, *cells in json.loads(GOLDEN.read_text())["table"]:
        if name.startswith("ctx_tg"):
            continue
        wanted = [cell for cell in cells if cell]
        rows = [line for line in lines if line.startswith(name)]
        found = [re.findall(r"[\d.]+ ± [\d.]+", row) for row in rows]
        assert wanted in found, (name, wanted, found)


@pytest.mark.conformance
def test_the_golden_file_is_what_llama_benchy_computes():
    assert BENCHY_PYTHON.exists(), f"{BENCHY_PYTHON} is not there: `make conformance-test` makes its environment first"
    done = subprocess.run(
        [BENCHY_PYTHON, "-c", COMPUTE], input=as_input(recorded_cells()), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(GOLDEN.read_text())


def test_an_unknown_prompt_is_null_and_not_zero():
    unknown = replace(LOAD, requests=tuple(replace(one, prompt_tokens=None) for one in LOAD.requests))
    made = as_vllm_bench(run_of(unknown))
    assert (made["total_input_tokens"], made["total_token_throughput"], made["input_lens"]) == (None, None, [None] * 3)


READ = """
import sys
from llama_benchy.results import BenchmarkMetadata, BenchmarkReport, BenchmarkResults
report = BenchmarkReport.model_validate_json(open(sys.argv[1]).read(), strict=True)
results = BenchmarkResults()
results.runs, results.model_name, results.metadata = report.benchmarks, report.model, report
print(results._generate_md_report(report.max_concurrency))
"""


@pytest.mark.conformance
def test_llama_benchy_reads_it_and_makes_its_own_table_of_it(tmp_path):
    assert BENCHY_PYTHON.exists(), f"{BENCHY_PYTHON} is not there: `make conformance-test` makes its environment first"
    write_json(as_llama_benchy(SWEEP), tmp_path / "benchy.json")
    command = [BENCHY_PYTHON, "-c", READ, tmp_path / "benchy.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("| tiny")
    ]
    assert [row[2] for row in rows] == [
        "pp64 (c1)",
        "tg10 (c1)",
        "ctx_pp @ d256 (c2)",
        "pp64 @ d256 (c2)",
        "tg10 @ d256 (c2)",
    ]
    assert rows[1][3] == "9.33 ± 1.33"
    assert json.loads((tmp_path / "benchy.json").read_text())["latency_mode"] == "none"
