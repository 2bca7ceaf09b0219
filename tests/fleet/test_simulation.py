"""The simulation against what can be worked out by hand, or is known of queues."""

import random
import statistics
from dataclasses import replace

import pytest

from onebox.fleet.measure import _Measurement
from onebox.fleet.simulation import POLICIES, RollingUpdate, simulate_clients, simulate_trace, simulate_users
from onebox.fleet.step_times import StepTimes, read_step_times, write_step_times
from onebox.fleet.study import FleetStudy
from onebox.fleet.traffic import BLOCK_TOKENS, Turn, UserTraffic, read_trace
from onebox.spec.errors import OneboxError

TIMES = StepTimes({1: 0.1, 3: 0.2}, prompt_base_s=0.05, prompt_token_s=0.001, max_num_seqs=2, chunk_tokens=200)
USERS = UserTraffic("agent", 12, think_s=1.0)


def test_steps_take_what_was_measured_and_what_lies_between():
    assert [round(TIMES.decode_step_s(rows), 3) for rows in (1, 2, 3, 5)] == [0.1, 0.15, 0.2, 0.3]
    assert TIMES.step_s(1, 100) == pytest.approx(0.25)
    assert TIMES.step_s(0, 100) == pytest.approx(0.15)


def test_requests_alone_and_together_take_the_steps_that_the_engine_takes():
    alone, second, third = simulate_trace([TIMES], [Turn(0, 300, 3), Turn(10, 100, 3), Turn(10, 100, 2)])
    # Two steps of prompt (200 and 100 tokens), then two of decoding.
    assert alone.first_s == pytest.approx(0.25 + 0.15)
    assert alone.ended_s == pytest.approx(0.4 + 2 * 0.1)
    # The third arrives while the second's prompt is computed; then a step has its prompt and a decode row.
    assert second.first_s == pytest.approx(10.15)
    assert third.first_s == pytest.approx(10.15 + 0.1 + 0.15)
    assert second.ended_s == third.ended_s == pytest.approx(10.4 + 0.15)


def test_a_queue_of_equal_jobs_waits_as_theory_says():
    """One slot, constant service, random arrivals: an M/D/1 queue, whose mean wait is known."""
    times = StepTimes({1: 1.0}, prompt_token_s=1.0, max_num_seqs=1)
    draw, moment, turns = random.Random(3), 0.0, []
    for number in range(8_000):
        moment += draw.expovariate(0.7)
        turns.append(Turn(moment, 1, 1, session=number))
    waits = [request.wait_s - 1.0 for request in simulate_trace([times], turns)]
    assert statistics.fmean(waits) == pytest.approx(0.7 / (2 * (1 - 0.7)), rel=0.1)


def test_a_prefix_is_found_where_it_was_computed_and_evicted_when_others_need_the_room():
    blocks = tuple(("a", place) for place in range(3))
    others = tuple(("b", place) for place in range(3))
    length = 3 * BLOCK_TOKENS + 10
    turns = [Turn(0, length, 1, blocks), Turn(10, length, 1, blocks), Turn(20, length, 1, others)]
    turns += [Turn(30, length, 1, blocks)]
    small = StepTimes({1: 0.1}, cache_tokens=3 * BLOCK_TOKENS)
    assert [request.cached_tokens for request in simulate_trace([small], turns)] == [0, 3 * BLOCK_TOKENS, 0, 0]
    large = StepTimes({1: 0.1}, cache_tokens=6 * BLOCK_TOKENS)
    hits = [request.cached_tokens for request in simulate_trace([large, large], turns, "affinity")]
    assert hits == [0, 3 * BLOCK_TOKENS, 0, 3 * BLOCK_TOKENS]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_once_also_through_a_rolling_update(policy):
    found = simulate_users([TIMES] * 3, USERS, 60, policy, RollingUpdate(10, 5))
    assert all(request.ended_s is not None and request.member >= 0 for request in found)
    assert {request.member for request in found} == {0, 1, 2}
    again = simulate_users([TIMES] * 3, USERS, 60, policy, RollingUpdate(10, 5))
    assert [(each.member, each.ended_s) for each in found] == [(each.member, each.ended_s) for each in again]


def test_affinity_and_more_boxes_are_worth_something_and_an_update_costs_something():
    result = FleetStudy(TIMES, USERS, seconds=300).answer((1, 2, 4), "affinity", first_token_s=1.0, down_s=30)
    waits = [row.first_p90_s for row in result.by_boxes]
    assert waits == sorted(waits, reverse=True)
    assert result.enough in (2, 4, None)
    by_policy = {row.policy: row for row in result.by_policy}
    assert by_policy["affinity"].hit_share > 1.5 * by_policy["random"].hit_share
    assert by_policy["affinity"].first_p50_s < by_policy["random"].first_p50_s
    assert result.updated.first_p99_s > by_policy["affinity"].first_p99_s


def test_traces_of_all_forms_are_read(tmp_path):
    path = tmp_path / "trace"
    path.write_text(
        '{"at": 5, "prompt_tokens": 130, "answer_tokens": 7, "session": "s"}\n'
        '{"at": 3.5, "prompt_tokens": 64, "answer_tokens": 2}\n'
    )
    first, second = read_trace(path)
    assert (first.at_s, first.prompt_tokens, second.at_s, second.session) == (0, 64, 1.5, "s")
    assert len(second.blocks) == 2
    path.write_text(
        '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 3, 4]}\n'
    )
    first, second = read_trace(path)
    shared = [mine for mine, its in zip(first.blocks, second.blocks, strict=False) if mine == its]
    assert (second.at_s, len(shared) * BLOCK_TOKENS, len(first.blocks)) == (2, 512, 700 // BLOCK_TOKENS)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    (only,) = read_trace(path)
    assert (only.at_s, only.prompt_tokens, only.answer_tokens) == (0, 374, 44)
    for wrong in ("hello", '{"at": 0, "prompt_tokens": 0, "answer_tokens": 1}', '{"at": NaN, "prompt_tokens": 1}'):
        path.write_text(wrong)
        with pytest.raises(OneboxError, match="no trace that is known"):
            read_trace(path)


def test_step_times_are_written_and_read_back_and_nonsense_is_refused(tmp_path):
    path = tmp_path / "steps.json"
    times = replace(TIMES, slowdowns={2: (1.5, 1.25), 3: (2.0, 1.75)}, prompt_ratios=(0.9, 1.2))
    write_step_times(times, path)
    assert read_step_times(path) == times
    path.write_text('{"decode_s": {"1": 1}, "slowdowns": {"2": [1, 0]}}')
    with pytest.raises(OneboxError, match="slowdowns"):
        read_step_times(path)
    for wrong in ('{"decode_s": {}}', '{"decode_s": {"1": NaN}}', '{"decode_s": {"1": 1}, "request_s": -1}'):
        path.write_text(wrong)
        with pytest.raises(OneboxError, match=r"decode_s|request_s"):
            read_step_times(path)
    path.write_text('{"decode": 1}')
    with pytest.raises(OneboxError, match="does not describe step times"):
        read_step_times(path)


def test_the_command_answers_the_three_questions(run_cli, tmp_path):
    path = tmp_path / "steps.json"
    write_step_times(TIMES, path)
    result = run_cli("fleet", "simulate", "--steps", path, "--seconds", "60", "--boxes", "1,3", "--roll", "5")
    assert result.code == 0
    assert "nine of ten first tokens within 2 s" in result.out
    assert "What affinity is worth" in result.out
    assert "A rolling update, each box 5 s away" in result.out
    assert run_cli("fleet", "simulate").code == 2
    for wrong in (("--save", tmp_path / "more.json"), ("--policy", "best"), ("--users", "0"), ("--mix", "none")):
        refused = run_cli("fleet", "simulate", "--steps", path, *wrong)
        assert (refused.code, refused.out) == (2, "")
    nowhere = run_cli("fleet", "simulate", "--measure", "http://127.0.0.1:9", "--save", tmp_path / "no" / "x.json")
    assert "there is no directory" in nowhere.err
    assert run_cli("fleet", "simulate", "--steps", path, "--boxes", "0").code == 2


def test_options_that_a_trace_would_ignore_are_refused(run_cli, tmp_path):
    path, trace = tmp_path / "steps.json", tmp_path / "trace.jsonl"
    write_step_times(TIMES, path)
    trace.write_text('{"at": 0, "prompt_tokens": 100, "answer_tokens": 3}\n')
    options = ("fleet", "simulate", "--steps", path, "--trace", trace, "--boxes", "1")
    assert "Boxes for the trace trace.jsonl" in run_cli(*options).out
    refused = run_cli(*options, "--users", "3", "--seconds", "60")
    assert refused.code == 2
    assert "leave out --users, --seconds with --trace" in refused.err


def test_servers_with_a_key_are_measured_with_it(run_cli, tmp_path, monkeypatch):
    asked = []

    async def measure(urls, *, api_key):
        asked.append((urls, api_key))
        return TIMES

    monkeypatch.setattr("onebox.fleet.measure.measure_step_times", measure)
    saved = tmp_path / "steps.json"
    options = ("--measure", "http://box:8000/v1", "--api-key", "sesame", "--save", saved, "--seconds", "5")
    assert run_cli("fleet", "simulate", *options, "--boxes", "1").code == 0
    assert asked == [(["http://box:8000"], "sesame")]
    assert read_step_times(saved) == TIMES


def test_prompts_beside_answers_take_what_answers_may_wait_for():
    times = StepTimes({1: 0.01}, prompt_base_s=0.01, prompt_token_s=0.0001, chunk_tokens=2048, answer_wait_s=0.05)
    assert times.prompt_room(0) == 2048
    assert times.prompt_room(1) == 320  # 30 ms, in whole pages
    assert replace(times, answer_wait_s=0.0).prompt_room(1) == 192  # as long again as the rest of the step
    assert replace(times, answer_wait_s=None).prompt_room(1) == 2048


def test_members_of_one_machine_slow_each_other_down_while_both_compute():
    times = StepTimes({1: 1.0}, prompt_token_s=1.0, slowdowns={2: (3.0, 2.0)})
    turns = [Turn(0, 4, 1), Turn(2, 1, 1), Turn(2, 3, 1)]
    long, short, elsewhere = simulate_trace([times] * 3, turns, "round_robin")
    # From 2 s on both go on at half their pace; the short one is done at 4, the long one then has a second left.
    assert (short.first_s, long.first_s) == (pytest.approx(4), pytest.approx(5))
    assert elsewhere.first_s == pytest.approx(5)  # the third is on a machine of its own
    own = replace(times, slowdowns={})
    assert [each.first_s for each in simulate_trace([own] * 3, turns, "round_robin")] == [4, 3, 5]
    assert times.step_s(1, 4, num_busy=2) == pytest.approx(3 + 2 * 4)


def test_steps_with_prompts_vary_as_they_were_measured_and_equal_seeds_give_equal_figures():
    times = StepTimes({1: 1.0}, prompt_token_s=1.0, prompt_ratios=(0.5, 1.5))
    turns = [Turn(0, 2, 2) for _ in range(200)]
    runs = [simulate_clients([times], turns, 1, seed=seed) for seed in (1, 1, 2)]
    waits = [[round(request.wait_s, 6) for request in run] for run in runs]
    assert set(waits[0]) == {1.0, 3.0}
    assert waits[0] == waits[1] != waits[2]
    assert statistics.fmean(waits[0]) == pytest.approx(2, rel=0.1)
    # Decode steps take what they take.
    assert {round(request.ended_s - request.first_s, 6) for request in runs[0]} == {1.0}


def test_the_costs_of_prompts_are_told_from_what_stands_beside_them():
    """A wait is the request, half a step that runs already, the answers' rows, the prompt's own time."""
    beside_s = 0.002 + 1.5 * 0.01
    waits = [(tokens, beside_s + 0.03 + 0.001 * tokens) for tokens in (40, 160, 400)]
    alone = _Measurement({1: 0.01, 4: 0.01}, 1.0, num_beside=2, waits=waits, requests_s=[0.002])
    assert alone.prompt_costs() == (pytest.approx(0.03), pytest.approx(0.001))
    assert alone.prompt_ratios() == (1.0, 1.0, 1.0)
    slow = [(tokens, 0.002 + 1.5 * 0.03 + 2 * (0.03 + 0.001 * tokens)) for tokens in (40, 160, 400)]
    shared = _Measurement({1: 0.03, 4: 0.03}, 1.0, num_beside=2, waits=slow, requests_s=[0.002])
    assert shared.slowdown(alone) == (pytest.approx(3), pytest.approx(2))
