"""Every check of the soak finds the fault it is there for, and nothing where there is none."""

import json

import pytest

from benchmarks.soak.checks import (
    CanarySample,
    HealthSample,
    LogScan,
    QuietState,
    check_error,
    check_quiet,
    compare_quarters,
    longest_wait_s,
    summarize_health,
)

BASE = QuietState(
    0, 0, 0.0, 0, {"server": 8, "engine": 4}, {"server": 10, "engine": 4}, {"server": 100 << 20}, {"server": 120 << 20}
)
OPENAI = {"error": {"message": "The queue is full.", "type": "invalid_request_error", "param": None, "code": None}}


def scan(*lines, may_die=False):
    scan = LogScan()
    return [found for line in lines if (found := scan.take(line, engine_may_die=may_die))]


def test_a_good_error_of_each_dialect_passes():
    anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": "model is missing."}}
    assert not check_error(400, json.dumps(OPENAI).encode(), "/v1/chat/completions")
    assert not check_error(400, json.dumps(anthropic).encode(), "/v1/messages")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b"Internal Server Error", "/v1/completions"),
        (b'{"detail": "Not Found"}', "/v1/completions"),
        (b'{"error": {"type": "server_error", "message": ""}}', "/v1/completions"),
        (b'{"error": {"type": "server_error", "message": "It failed.", "param": NaN}}', "/v1/completions"),
        (json.dumps({"error": {**OPENAI["error"], "message": "x" * 20_000}}).encode(), "/v1/completions"),
        (json.dumps(OPENAI).encode(), "/v1/messages"),
    ],
    ids=["text", "no error", "no message", "no JSON", "too long", "wrong dialect"],
)
def test_a_bad_error_is_found(body, path):
    assert check_error(500, body, path)


def test_an_idle_server_as_before_has_no_leak():
    assert not check_quiet(BASE, BASE, 0)
    assert not check_quiet(BASE._replace(num_restarts=2), BASE, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_running": 1},
        {"num_waiting": 3},
        {"page_usage": 0.01},
        {"num_restarts": 1},
        {"num_descriptors": {"server": 9, "engine": 4}},
        {"num_descriptors": {"server": 8}},
        {"num_threads": {"server": 80, "engine": 4}},
        {"rss_bytes": {"server": 600 << 20}},
        {"peak_bytes": {"server": 3 << 30}},
    ],
    ids=lambda changed: f"{changed}",
)
def test_whatever_does_not_come_back_is_found(changed):
    assert len(check_quiet(BASE._replace(**changed), BASE, 0)) == 1


def test_memory_that_grows_is_found_and_flat_memory_is_not():
    growing = [100.0 + 0.1 * minute for minute in range(40)]
    noisy = [100.0 + (minute % 3) * 0.5 for minute in range(40)]
    assert not compare_quarters("server", growing, 2400).is_flat
    assert compare_quarters("server", growing, 2400).share == pytest.approx(0.03, abs=0.001)
    assert compare_quarters("server", noisy, 2400).is_flat
    assert compare_quarters("server", growing, 180).is_flat
    assert not compare_quarters("server", [100.0, 100.0, 112.0, 115.0], 180).is_flat
    assert compare_quarters("server", [1.0] * 3, 2400) is None


def test_the_longest_silence_is_before_the_first_byte_or_between_two():
    assert longest_wait_s(10.0, [14.0, 14.5]) == 4.0
    assert longest_wait_s(10.0, [10.5, 15.5, 15.6]) == 5.0
    assert longest_wait_s(10.0, []) == 0.0


def test_waits_for_a_core_are_not_the_servers():
    assert HealthSample(0.0, 1.5, 200, 1.2).net_s == pytest.approx(0.3)
    assert CanarySample(0.0, 5.0, 4.0, 0.5, 200).net_s == 3.5
    slow = [HealthSample(float(at), 0.002, 200) for at in range(99)] + [HealthSample(99.0, 4.0, 200, 0.1)]
    summary = summarize_health(slow)
    assert (summary["over_1_s"], summary["over_1_s_net"], summary["over_3_s"]) == (1, 1, 1)
    assert summary["worst_s"] == 4.0
    assert summarize_health([HealthSample(0.0, 15.0, 0)])["unanswered"] == 1


def test_a_traceback_in_the_log_is_one_finding_named_by_its_last_line():
    lines = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    f()", "ValueError: no", "Ready"]
    assert scan(*lines) == ["traceback: ValueError: no"]


def test_lines_that_should_not_be_in_a_log_are_found():
    assert scan("Task exception was never retrieved")
    assert scan("the engine died: its process was killed by SIGKILL")
    assert scan("Fatal Python error: Segmentation fault")
    assert not scan("the engine died: its process was killed by SIGKILL", "the engine runs again", may_die=True)
    assert not scan("Ready after 3.1 s: pocket at http://127.0.0.1:8000/v1", "weights: 0.38 s")


def test_an_engine_may_die_of_the_memory_that_it_is_refused_and_of_nothing_else():
    lines = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()"]
    refused = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes."
    assert not scan(*lines, refused, may_die=True)
    assert not scan(*lines, "MemoryError", may_die=True)
    assert scan(*lines, refused) == [f"traceback: {refused}"]
    assert scan(*lines, "KeyError: 3", may_die=True) == ["traceback: KeyError: 3"]
