"""Two runs side by side."""

import random
from dataclasses import replace

import pytest

from onebox.bench.compare import Change, compare_runs
from onebox.bench.record import (
    Failure,
    Hardware,
    Reason,
    RequestRecord,
    Role,
    Run,
    Server,
    WorkloadKind,
    WorkloadRecord,
    write_run,
)
from onebox.spec.errors import MismatchError


def request(role, speed, number):
    """An answer of 21 tokens, the first after half of the time that 20 more take; a little different each time."""
    step_s = (1 + 0.02 * (number % 4)) / speed
    arrivals = tuple(10 * step_s + step_s * place for place in range(21))
    return RequestRecord(
        role, 0.0, arrivals[-1], arrivals, (1,) * 21, 64, 21, "usage", finish_reason="stop", run=number
    )


def workload(name, kind, speed, count, **settings):
    roles = {WorkloadKind.SINGLE: (Role.COLD, Role.WARM)}.get(kind, (Role.LOAD,))
    requests = tuple(request(role, speed, number) for number in range(count) for role in roles)
    return WorkloadRecord(name, kind, {"max_tokens": 64, **settings}, requests, 1.0, {"decode_p50_tok_s": speed})


def run(speed=100.0, count=5, **changes):
    workloads = (
        workload("Q&A", WorkloadKind.SINGLE, speed, count),
        workload("uniform_short c=4", WorkloadKind.LOAD, speed, 3 * count),
        workload("pp512 tg64 c1", WorkloadKind.SWEEP, speed, count),
    )
    made = Run(
        "2026-01-01T00:00:00+00:00",
        ("onebox", "bench"),
        {"ignore_eos": False},
        {"onebox": "0.1.0"},
        Hardware("a CPU", 2, 1 << 30, load_average=0.5),
        Server("http://127.0.0.1:8000", "pocket", "onebox", "0.1.0"),
        workloads=workloads,
    )
    return replace(made, **changes)


def test_a_run_is_not_slower_than_itself():
    found = compare_runs(run(), run())
    assert len(found.rows) == 4 + 3 + 2
    assert {row.change for row in found.rows} == {Change.NONE}
    assert all(row.ratio.low <= 1 <= row.ratio.high for row in found.rows)
    assert (found.differences, found.machines) == ((), ())


def test_runs_that_differ_by_chance_alone_are_not_told_apart():
    rng = random.Random(5)

    def noisy():
        made = run()
        return replace(
            made,
            workloads=tuple(
                replace(one, requests=tuple(request(r.role, rng.gauss(100, 6), r.run) for r in one.requests))
                for one in made.workloads
            ),
        )

    changes = [row.change for _ in range(12) for row in compare_runs(noisy(), noisy()).rows]
    assert len(changes) == 12 * 9
    assert sum(change is not Change.NONE for change in changes) <= 4


@pytest.mark.parametrize(("speed", "change"), [(80.0, Change.SLOWER), (125.0, Change.FASTER)])
def test_every_figure_of_another_speed_is_told_in_the_right_direction(speed, change):
    found = compare_runs(run(), run(speed))
    assert {row.change for row in found.rows} == {change}
    decode = found.rows[0]
    assert (decode.figure, decode.unit) == ("decode", "tok/s")
    assert decode.ratio.estimate == pytest.approx(speed / 100, rel=0.01)
    assert {row.method for row in found.rows} == {"means, Welch", "medians, resampled"}


def test_one_request_is_too_few_for_an_interval():
    found = compare_runs(run(count=1), run(50.0, count=1))
    assert {row.change for row in found.rows if row.num_first == 1} == {Change.UNKNOWN}


def test_runs_that_asked_for_other_things_are_refused_with_what_differs():
    other = run(workloads=(workload("Q&A", WorkloadKind.SINGLE, 100.0, 5, max_tokens=128), run().workloads[1]))
    with pytest.raises(MismatchError) as refused:
        compare_runs(run(), other)
    assert "Q&A: max_tokens is 64 in A and 128 in B" in str(refused.value)
    assert "pp512 tg64 c1 is only in A" in str(refused.value)
    found = compare_runs(run(), other, allow_different=True)
    assert len(found.differences) == 2
    assert {row.workload for row in found.rows} == {"Q&A", "uniform_short c=4"}


def test_a_different_setting_of_the_whole_run_is_refused_and_more_repetitions_are_not():
    with pytest.raises(MismatchError, match="ignore_eos is False in A and True in B"):
        compare_runs(run(), run(config={"ignore_eos": True}))
    more = run(workloads=tuple(replace(one, settings={**one.settings, "runs": 9}) for one in run().workloads))
    assert compare_runs(run(), more).differences == ()


def test_other_servers_and_machines_are_said(run_cli, tmp_path):
    second = run(server=Server("http://127.0.0.1:8000", "pocket", "vllm", "0.24"), commit="abc")
    for name, made in (("a.json", run()), ("b.json", second)):
        write_run(made, tmp_path / name)
    shown = run_cli("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert shown.code == 0, shown.err
    assert "server is 'onebox' in A and 'vllm' in B" in shown.out
    assert "Nothing is slower in B beyond chance." in shown.out


def test_failures_come_first_and_make_the_exit_code(run_cli, tmp_path):
    broken = replace(run().workloads[0].requests[0], failure=Failure(Reason.CUT, "It ended.", 200))
    first = run().workloads[0]
    failing = run(workloads=(replace(first, requests=(*first.requests[1:], broken)), *run().workloads[1:]))
    for name, made in (("a.json", run()), ("b.json", failing), ("slow.json", run(50.0))):
        write_run(made, tmp_path / name)
    shown = run_cli("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert shown.code == 1
    assert shown.out.startswith("B has 1 FAILED requests")
    slow = run_cli("bench", "compare", tmp_path / "a.json", tmp_path / "slow.json", "--json")
    assert slow.code == 3
    assert slow.out.count("\n") == 1
