"""The mixed load, on a tiny model on a CPU and on steps made up here: what it counts adds up, what is late is found."""

import json

import pytest

from onebox.engine.plan import EngineOptions
from onebox.lab import mixed, steps
from onebox.lab.clients import LoadClient, quantiles
from onebox.lab.mixed import MixedLoad
from onebox.lab.steps import Step, late_steps, longest_between
from onebox.spec.shapes import SHAPES
from tests.synthetic import tiny_config


def step(began, seconds, num_prompt=0, num_rows=8, num_first=0, device_s=None):
    done = (num_prompt, num_prompt, num_rows, num_first)
    kinds = {"num_chunks": 1, "num_adjusted": 2, "num_logprobs": 3, "delivering_s": 0.001, "num_launches": 4}
    return Step(began, began + seconds, *done, cpu_s=0.01, collecting_s=0.0, **kinds, device_s=device_s)


def test_a_step_is_late_beside_its_like_and_not_beside_others():
    decode = [step(i, 0.004) for i in range(50)]
    prefill = [step(50 + i, 0.1, num_prompt=2000) for i in range(50)]
    assert not late_steps([*decode, *prefill])
    late = step(200, 0.06)
    assert [found for _, found in late_steps([*decode, *prefill, late])] == [late]
    assert "2 adjusted, 3 with logprobs, 4 launches; the host 60 ms, 50 ms not on a CPU" in late.as_text(0.056)


def test_a_step_that_waits_for_the_prefill_before_it_is_not_late_by_the_devices_clock():
    steps = [step(i, 0.004, device_s=0.004) for i in range(50)]
    waiting = step(50, 0.1, device_s=0.004)
    idle = step(51, 0.004, device_s=0.1)
    assert [found for _, found in late_steps([*steps, waiting, idle])] == [idle]


def test_the_longest_waits_between_steps_come_first():
    found = longest_between([step(0.0, 0.1), step(0.1, 0.1), step(0.5, 0.1), step(0.65, 0.1)])
    assert found == pytest.approx([0.3, 0.05, 0.0])


def test_quantiles_name_the_worst():
    assert quantiles([0.1 * place for place in range(101)]) == {"p50": 5.0, "p90": 9.0, "p99": 9.9, "worst": 10.0}
    assert quantiles([])["worst"] == 0


def test_a_run_counts_requests_tokens_and_steps(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config())
    memory = iter(range(10_000))
    monkeypatch.setattr(steps.NoteWriter, "note_memory", lambda self, _: self.note("memory", [next(memory), 1]))
    monkeypatch.setattr(mixed, "EngineProcess", InThisProcess)
    monkeypatch.setattr(LoadClient, "run", lambda self, _: [self._ask(f"{self._number}-{place}") for place in range(2)])
    monkeypatch.setattr(mixed, "_REPORT_EVERY_S", 0.02)
    monkeypatch.setattr("onebox.lab.clients._PROMPT_TOKENS", (10, 90))
    monkeypatch.setattr("onebox.lab.clients._ANSWER_TOKENS", (16, 30))
    so_far = list[dict]()
    options = EngineOptions(device="cpu", load_format="dummy", max_model_len=512, kv_cache_memory_bytes=1 << 26)
    with MixedLoad.open("tiny", options, began=0.0) as load:
        assert load.start["weights_s"] >= 0
        assert load.start["plan_gib"]["weights"] >= 0
        found = load.run(2, 1.0, so_far.append)
    assert json.loads(json.dumps(found)) == found
    assert found["requests"] == 4
    assert not found["failures"]
    assert found["steps"] > 30
    assert found["tokens_per_s"] > 30
    assert found["highest_gib"] >= found["used_at_ready_gib"]
    assert json.loads(json.dumps(so_far)) == so_far
    assert all(so_far[-1][name] <= found[name] for name in ("requests", "steps", "highest_gib"))


class InThisProcess:
    """The engine of a starter, started here: a child would not have what the test replaced."""

    def __init__(self, starter, report, **_):
        planned = starter.plan(report)
        report(planned)
        self._engine = starter.start(planned, report, None)
        self.planned = planned

    def wait_ready(self):
        pass

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._engine.close()
