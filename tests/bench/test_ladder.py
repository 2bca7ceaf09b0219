"""The step ladder: what each step brought, and that what was measured is not measured again."""

import json
from dataclasses import replace

import pytest

from onebox.bench.figures import figures
from onebox.bench.ladder import RUNGS, chosen_rungs, ladder_rows, read_rung, rung_path
from onebox.bench.record import (
    Acceptance,
    Hardware,
    RequestRecord,
    Role,
    Run,
    Server,
    WorkloadKind,
    WorkloadRecord,
    read_run,
    write_run,
)
from onebox.bench.timing import decode_tok_s
from onebox.planner.presets import named_preset
from onebox.planner.report import Weights
from onebox.planner.roofline import Workload, project
from onebox.spec.errors import MismatchError, UsageError
from onebox.spec.hardware import BOXES
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec

PUBLISHED = {"base": 28.3, "hybrid": 30.8, "int8-head": 33.0, "mtp-1": 42.0, "mtp-2": 51.0, "turboquant": 39.0}
"""tok/s of the published ladder, filled up where it has no rung."""


def workload(name, speed, accepted):
    requests = []
    for number in range(3):
        step_s = (1 + 0.01 * number) / speed
        arrivals = tuple(0.5 + step_s * place for place in range(101))
        requests.append(RequestRecord(Role.COLD, 0.0, arrivals[-1], arrivals, (1,) * 101, 64, 101, "usage", run=number))
    made = WorkloadRecord(name, WorkloadKind.SINGLE, {}, tuple(requests), 9.0)
    drafts = Acceptance(90, 100, 1 + sum(accepted), "metrics", 100, accepted) if accepted else None
    return replace(made, figures=figures(made), acceptance=drafts)


def run(speed, accepted=(), **ladder):
    return Run(
        "2026-01-01T00:00:00+00:00",
        (),
        {"ladder": ladder},
        {"onebox": "0.1.0"},
        Hardware("a CPU", 2, 1 << 30),
        Server("http://x", "tiny"),
        workloads=(workload("Q&A", speed, accepted), workload("Code", 1.1 * speed, accepted)),
        kv_tokens=355_000,
    )


@pytest.fixture(scope="module")
def weights():
    spec = named_spec("qwen3.5-122b-a10b")
    presets = {"base": "autoround-int4", "hybrid": "hybrid", "head": "hybrid"}
    return {
        name: Weights("122B", preset, spec, named_preset(preset).weight_bytes(spec)) for name, preset in presets.items()
    }


def test_each_step_is_over_the_one_it_adds_to_and_beside_what_was_projected(weights):
    box = BOXES["dgx-spark"]
    accepted = {"mtp-1": (0.8,), "mtp-2": (0.8, 0.6), "turboquant": (0.8, 0.6)}
    runs = {key: run(speed, accepted.get(key, ())) for key, speed in PUBLISHED.items()}
    rows = {row.key: row for row in ladder_rows(runs, weights, box, (0.9, 0.72, 0.55))}
    assert list(rows) == list(PUBLISHED)
    mean = {key: row.decode_tok_s for key, row in rows.items()}
    assert mean["hybrid"] / mean["base"] == pytest.approx(30.8 / 28.3)
    assert (rows["base"].gain, rows["base"].gain_over_base) == (None, None)
    assert rows["hybrid"].gain == pytest.approx(30.8 / 28.3 - 1)
    assert rows["mtp-2"].gain == pytest.approx(51 / 42 - 1)
    assert rows["mtp-2"].gain_over_base == pytest.approx(51 / 28.3 - 1)
    # TurboQuant adds to two drafts, not to the three above it.
    assert (rows["turboquant"].over, rows["turboquant"].gain) == ("mtp-2", pytest.approx(39 / 51 - 1))
    low, high = rows["hybrid"].gain_interval
    assert low < rows["hybrid"].gain < high
    assert rows["mtp-2"].tokens_per_step == pytest.approx(2.4)
    planned = project(
        weights["head"].spec,
        weights["head"].stored,
        box,
        KVFormat.parse("bf16"),
        Workload(1, 2, 114, (0.9, 0.72), draft_vocab_size=40_960),
    )
    assert rows["mtp-2"].projected_tok_s == pytest.approx(planned.engine_rate.tokens_per_second)
    assert rows["mtp-2"].projected_as_accepted_tok_s < rows["mtp-2"].projected_tok_s
    assert rows["mtp-2"].step_bytes == planned.least.total_bytes
    assert set(rows["base"].by_workload) == {"Q&A", "Code"}


def test_a_rung_without_what_it_is_compared_with_has_no_gain(weights):
    (row,) = ladder_rows({"mtp-3": run(50.0)}, weights, BOXES["dgx-spark"], (0.9, 0.72, 0.55))
    assert (row.gain, row.gain_interval, row.gain_over_base) == (None, None, None)
    # Nobody said what was accepted at each place, so there is no projection as accepted.
    assert row.projected_as_accepted_tok_s is None
    assert row.projected_tok_s > 0


def test_rungs_are_chosen_by_name_in_the_ladders_order():
    assert [rung.key for rung in chosen_rungs(["mtp-1", "base"])] == ["base", "mtp-1"]
    assert chosen_rungs([]) == RUNGS
    with pytest.raises(UsageError, match="There is no rung 'mtp-9'; there are base, hybrid"):
        chosen_rungs(["mtp-9"])


def test_a_record_of_other_settings_is_no_rung_of_this_ladder(tmp_path):
    rung = RUNGS[0]
    assert read_rung(tmp_path, rung, {"runs": 3}) is None
    rung_path(tmp_path, rung).parent.mkdir()
    write_run(run(28.0, runs=3), rung_path(tmp_path, rung))
    assert read_rung(tmp_path, rung, {"runs": 3}).config["ladder"] == {"runs": 3}
    with pytest.raises(MismatchError, match=r"base\.json was measured with runs 3, not 5\. Delete it"):
        read_rung(tmp_path, rung, {"runs": 5})


def test_a_ladder_of_small_checkpoints_is_built_served_and_measured_once(run_cli, small_sources, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a server on a CPU needs no Triton
    arguments = (
        *("bench", "ladder", "--base", small_sources / "int4", "--fp8", small_sources / "fp8", "--dir", tmp_path),
        *("--rungs", "mtp-2", "--workloads", "math", "--runs", "1", "--warm-ups", "0", "--ignore-eos"),
        *("--max-context", "256", "--serve-options", "--max-model-len 512", "--idle", "0", "--json"),
    )
    made = run_cli(*arguments)
    assert made.code == 0, made.out + made.err
    (drafted,) = json.loads(made.out)["rows"]
    assert drafted["key"] == "mtp-2"
    assert (drafted["gain"], drafted["over"]) == (None, "mtp-1")
    record = read_run(tmp_path / "rungs" / "mtp-2.json")
    assert record.is_success
    (cold,) = [request for request in record.workloads[0].measured if request.role is Role.COLD]
    assert cold.completion_tokens
    # Without a speed where a busy machine delivers the whole answer at once.
    assert drafted["decode_tok_s"] == (pytest.approx(decode_tok_s(cold)) if decode_tok_s(cold) else None)
    assert record.workloads[0].acceptance.drafted > 0
    assert record.startup_s["first token"] > 0
    assert record.kv_tokens == drafted["kv_tokens"] > 0
    assert (tmp_path / "head" / "onebox_manifest.json").exists()
    # Again: nothing is served or measured, and the rows are the same.
    written = (tmp_path / "rungs" / "mtp-2.json").stat().st_mtime_ns
    again = run_cli(*arguments)
    assert again.code == 0, again.out + again.err
    assert "mtp-2: measured before" in again.err
    assert again.out == made.out
    assert (tmp_path / "rungs" / "mtp-2.json").stat().st_mtime_ns == written
    other = run_cli(*arguments[:-1], "--seed", "4")
    assert other.code != 0
    assert "was measured with seed 1, not 4" in other.err
