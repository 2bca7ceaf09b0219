"""What was measured comes back from its file as it was, or is refused."""

import json
from dataclasses import replace

import pytest

from onebox.bench.record import (
    Acceptance,
    Failure,
    Hardware,
    Power,
    Reason,
    RequestRecord,
    Role,
    Run,
    Server,
    WorkloadKind,
    WorkloadRecord,
    read_run,
    write_run,
)
from onebox.spec.errors import UnreadableError, WriteError

REQUEST = RequestRecord(Role.COLD, 0.5, 2.0, (0.25, 1.5), (1, 3), 64, 4, "usage", 0, None, 2, 1, "stop", "ab", "qa")
FAILED = replace(REQUEST, failure=Failure(Reason.CUT, "It broke.", 200))
WORKLOAD = WorkloadRecord(
    "Q&A",
    WorkloadKind.SINGLE,
    {"prompt_tokens": 64, "nested": {"list": [1, 2]}},
    (REQUEST, FAILED),
    2.0,
    {"decode_p50_tok_s": 2.4},
    Acceptance(2, 3, 2.0, "usage", 2, (0.75, 0.25)),
    ("a note",),
)
RUN = Run(
    "2026-11-15T10:00:00+00:00",
    ("onebox", "bench"),
    {"seed": 1},
    {"onebox": "0.1.0"},
    Hardware("a CPU", 2, 8 << 30, ("a GPU",), 0.5),
    Server("http://h:1", "tiny", "onebox", "0.1.0", 4096, ("text", "image"), "vllm", True, True),
    workloads=(WORKLOAD, WorkloadRecord("Vision", WorkloadKind.SINGLE, skipped="no pictures")),
    startup_s={"weights": 0.5},
    memory_bytes={"weights": 1024},
    power=Power(100.0, 150.0, 10.0, 7, 1.0),
)


def test_a_run_comes_back_from_its_file_as_it_was(tmp_path):
    write_run(RUN, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == RUN


def test_a_run_with_a_failure_an_interruption_or_nothing_measured_is_no_success():
    good = replace(RUN, workloads=(replace(WORKLOAD, requests=(REQUEST,)),))
    assert good.is_success
    assert not RUN.is_success
    assert not replace(good, interrupted=True).is_success
    assert not replace(good, workloads=(RUN.workloads[1],)).is_success
    warm_up_failed = replace(WORKLOAD, requests=(REQUEST, replace(FAILED, role=Role.WARM_UP)))
    assert not replace(good, workloads=(warm_up_failed,)).is_success


def test_figures_are_of_whole_answers_after_the_warm_up():
    requests = (replace(REQUEST, role=Role.WARM_UP), REQUEST, FAILED)
    assert replace(WORKLOAD, requests=requests).measured == (REQUEST,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: value.pop("server"), "run.server is missing"),
        (lambda value: value.update(surprise=1), "run holds 'surprise'"),
        (lambda value: value["workloads"][0].update(kind="other"), "run.workloads.0..kind is 'other'"),
        (lambda value: value["workloads"][0]["requests"][0].update(total_s="x"), "requests.0..total_s is 'x'"),
        (lambda value: value["hardware"].update(num_cores=True), "num_cores is True"),
        (lambda value: value.update(format="onebox-bench/0"), "its format is 'onebox-bench/0'"),
    ],
)
def test_a_damaged_record_is_refused_with_the_place(tmp_path, change, words):
    path = tmp_path / "run.json"
    write_run(RUN, path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UnreadableError, match=words):
        read_run(path)


def test_what_is_no_record_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("hello")
    for name, words in (
        ("list.json", "not a result of this onebox"),
        ("text.json", "is not JSON"),
        ("none", "cannot be"),
    ):
        with pytest.raises(UnreadableError, match=words):
            read_run(tmp_path / name)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.raises(WriteError, match="could not be written"):
        write_run(RUN, tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
