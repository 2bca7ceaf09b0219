"""Two runs side by side."""

import math
import random
from dataclasses import replace

import numpy
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
from onebox.bench.statistics import welch
from onebox.bench.timing import decode_tok_s
from onebox.spec.errors import MismatchError


def request(role, speed, number):
    """An answer of 21 tokens, the first after half of the time that 20 more take; a little different each time."""
    step_s = (1 + 0.02 * (number % 4)) / speed
    arrivals = tuple(10 * step_s + step_s * place for place in range(21))
    # One after the other: what does not overlap is as good as a block of its own.
    return RequestRecord(
        role,
        number * arrivals[-1],
        arrivals[-1],
        arrivals,
        (1,) * 21,
        64,
        21,
        "usage",
        finish_reason="stop",
        run=number,
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
    assert {row.workload: row.units for row in found.rows} == {
        "Q&A": "run",
        "uniform_short c=4": "block",
        "pp512 tg64 c1": "batch",
    }


def test_too_few_units_are_a_verdict_of_their_own(run_cli, tmp_path):
    found = compare_runs(run(count=1), run(50.0, count=1))
    assert {row.change for row in found.rows} == {Change.TOO_FEW}
    assert "Q&A: measure with --runs 2 or more" in found.advice
    # All at once: 15 requests and one block of time.
    overlapping = [
        run(
            speed,
            workloads=tuple(
                replace(one, requests=tuple(replace(request, start_s=0.0) for request in one.requests))
                for one in run(speed).workloads
                if one.kind is WorkloadKind.LOAD
            ),
        )
        for speed in (100.0, 50.0)
    ]
    told = compare_runs(*overlapping)
    assert {row.change for row in told.rows} == {Change.TOO_FEW}
    assert {row.num_first for row in told.rows} == {15}
    assert "its requests overlap; measure with --duration" in told.advice[0]
    for name, made in zip("ab", overlapping, strict=True):
        write_run(made, tmp_path / name)
    shown = run_cli("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert shown.code == 4
    assert "3 of 3 rows are too few to tell" in shown.out
    assert "beyond chance" not in shown.out


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


TASK_TOKENS = {"qa": 256, "code": 300, "kie": 320, "hungarian": 200}


class SharedServer:
    """A server whose speed varies, for all its streams alike: `spread` (a share), renewed every `renewal_s` or so."""

    def __init__(self, draw, speed, spread=0.08, renewal_s=5.0, length_s=400.0):
        count = int(3 * length_s / renewal_s) + 50
        self._times = numpy.concatenate([[0.0], numpy.cumsum(draw.exponential(renewal_s, count))])
        made = speed * numpy.exp(spread * draw.normal(0, 1, count)) * numpy.diff(self._times)
        self._tokens = numpy.concatenate([[0.0], numpy.cumsum(made)])

    def after(self, start_s, tokens):
        """When a stream that starts at `start_s` has made so many tokens."""
        begun = numpy.interp(start_s, self._times, self._tokens)
        return numpy.interp(begun + numpy.asarray(tokens), self._tokens, self._times) - start_s


def simulated(draw, speed=100.0, clients=4, duration_s=90.0, **server):
    """A closed loop against a shared server, as a run."""
    shared, free, requests = SharedServer(draw, speed, **server), [0.0] * clients, []
    while min(free) < duration_s:
        lane, number = free.index(min(free)), len(requests)
        label = list(TASK_TOKENS)[number % 4]
        tokens = max(round(TASK_TOKENS[label] * math.exp(0.25 * draw.normal())), 16)
        prompt = 20 * math.exp(0.02 * draw.normal())
        arrivals = shared.after(free[lane], [prompt, prompt + tokens / 2, prompt + tokens])
        counts = (1, tokens // 2, tokens - 1 - tokens // 2)
        made = RequestRecord(Role.LOAD, free[lane], arrivals[-1], tuple(arrivals), counts, 64, tokens, "usage")
        requests.append(replace(made, label=label, run=number))
        free[lane] += arrivals[-1]
    load = WorkloadRecord("mix c=4", WorkloadKind.LOAD, {}, tuple(requests), max(free))
    return run(workloads=(load,))


def test_two_loads_of_one_server_are_told_apart_no_more_often_than_chance_allows():
    """At 95% confidence, 5% of the trials: here at most 7%, whether a shared speed lasts shortly or long."""
    servers = (
        {"renewal_s": 1.0},
        {"renewal_s": 5.0},
        {"renewal_s": 5.0, "clients": 8},
        {"renewal_s": 20.0, "spread": 0.05},
    )
    draw, wrong, trials = numpy.random.default_rng(7), 0, 160
    for trial in range(trials):
        server = servers[trial % len(servers)]
        told = compare_runs(simulated(draw, 60.0, **server), simulated(draw, 60.0, **server))
        assert not told.untold
        wrong += any(row.change is not Change.NONE for row in told.rows)
    assert wrong / trials <= 0.07


def test_requests_taken_for_independent_would_be_told_apart_far_too_often():
    """What the simulation is for: overlapping requests are not independent."""
    draw, found = numpy.random.default_rng(7), 0
    for _ in range(40):
        first, second = (
            [math.log(decode_tok_s(request)) for request in simulated(draw).workloads[0].requests] for _ in range(2)
        )
        interval = welch(first, second)
        found += not interval.low <= 0 <= interval.high
    assert found / 40 > 0.3


@pytest.mark.parametrize(
    ("change", "duration_s", "least"), [({"spread": 0.03}, 90.0, 0.7), ({"spread": 0.08}, 240.0, 0.7)]
)
def test_a_real_difference_of_a_tenth_is_found(change, duration_s, least):
    draw, found, trials = numpy.random.default_rng(9), 0, 30
    for _ in range(trials):
        told = compare_runs(
            simulated(draw, 100.0, duration_s=duration_s, **change),
            simulated(draw, 90.0, duration_s=duration_s, **change),
        )
        found += any(row.change is Change.SLOWER for row in told.rows)
        assert not any(row.change is Change.FASTER for row in told.rows)
    assert found / trials >= least


def test_a_sweep_is_compared_by_its_batches():
    """Four requests of a batch share its speed: 20 requests are five values."""
    draw, wrong, trials = numpy.random.default_rng(4), 0, 120

    def swept():
        requests = []
        for number in range(5):
            speed = 100 * math.exp(0.05 * draw.normal())
            requests += [
                replace(request(Role.LOAD, speed * math.exp(0.005 * draw.normal()), 0), run=number, start_s=0.0)
                for _ in range(4)
            ]
        return run(workloads=(WorkloadRecord("pp c4", WorkloadKind.SWEEP, {}, tuple(requests), 1.0),))

    for _ in range(trials):
        rows = compare_runs(swept(), swept()).rows
        assert {row.num_units for row in rows} == {(5, 5)}
        wrong += any(row.change is not Change.NONE for row in rows)
    assert wrong / trials <= 0.07
