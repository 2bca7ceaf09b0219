"""GET /metrics says what was done, under vLLM's names, in a form that Prometheus' own parser reads."""

import math
import time
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from onebox.engine.api import (
    DiskStats,
    DraftVocabStats,
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    SpeculationConfig,
    SpeculationMethod,
)
from onebox.sensors import SensorReading, SensorWatch
from onebox.server.endpoints.metrics import metrics_router
from onebox.server.metrics import Metrics
from tests.engine.fake import FAILING, FakeRunner, tokens_of
from tests.server.conftest import wait_until

CONFIG = EngineConfig(
    max_model_len=500,
    num_pages=30,
    num_checkpoints=4,
    max_num_seqs=2,
    max_num_waiting=4,
    speculation=SpeculationConfig(SpeculationMethod.MTP, 3),
)
# What dashboards and routers for vLLM read; from its documentation.
VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
}

DISK_COUNTERS = ("read_bytes", "written_bytes", "saved_seconds", "damaged", "dropped", "evicted")
DISK_GAUGES = ("entries", "bytes", "writing")
DISK_NAMES = [
    *(f"onebox:prefix_disk_{name}_total" for name in DISK_COUNTERS),
    *(f"onebox:prefix_disk_{name}" for name in DISK_GAUGES),
]


class Scraped:
    """What one reading of /metrics holds."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain")
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name, **labels) -> float:
        """The one sample of that name with these labels."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return found[0]


@pytest.fixture
def engine():
    runner = FakeRunner(CONFIG)
    with Engine(runner, CONFIG) as engine:
        engine.runner = runner
        yield engine
        runner.gate.set()


@pytest.fixture
def scrape(engine):
    app = FastAPI()
    app.include_router(metrics_router(Metrics.of_engine(engine, "tiny")))
    with TestClient(app) as client:
        yield lambda: Scraped(client.get("/metrics"))


def test_what_does_not_change_is_told_by_its_part(engine):
    app = FastAPI()
    app.include_router(
        metrics_router(Metrics.of_engine(engine, "tiny", {"weights": 2048}, {"weights": 0.5, "warm-up": 0.25}))
    )
    with TestClient(app) as client:
        metrics = Scraped(client.get("/metrics"))
    assert metrics("onebox:memory_bytes", part="weights") == 2048
    assert metrics("onebox:startup_seconds", phase="weights") == 0.5
    assert metrics("onebox:startup_seconds", phase="warm-up") == 0.25


def request(name, prompt=(1,) * 100, **options):
    return Request(name, tuple(prompt), SamplingParams(**({"max_tokens": 20} | options)))


def test_every_name_is_there_from_the_start_with_its_kind_and_the_models_name(scrape):
    metrics = scrape()
    assert {name: metrics.families[name].type for name in VLLM_NAMES} == VLLM_NAMES
    assert all(sample.labels["model_name"] == "tiny" for sample in metrics.samples)
    assert metrics("vllm:request_success_total", finished_reason="stop") == 0
    assert metrics("onebox:engine_up") == 1


def test_requests_that_went_well_are_counted_with_their_tokens_and_times(engine, scrape):
    answers = [list(handle) for handle in engine.submit_copies(request("a"), 3)]
    metrics, ends = scrape(), [events[-1] for events in answers]
    assert metrics("vllm:request_success_total", finished_reason="length") == 3
    assert metrics("vllm:prompt_tokens_total") == 300
    assert metrics("vllm:generation_tokens_total") == sum(len(tokens_of(events)) for events in answers) == 60
    assert metrics("vllm:request_prompt_tokens_sum") == 300
    assert metrics("vllm:request_generation_tokens_bucket", le="20.0") == 3
    assert metrics("vllm:request_generation_tokens_bucket", le="10.0") == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert metrics(f"vllm:{name}_seconds_count") == 3
    deliveries = sum(1 for events in answers for event in events if tokens_of([event])) - 3
    assert metrics("vllm:inter_token_latency_seconds_count") == deliveries
    drafts = sum((end.counts.drafts for end in ends[1:]), ends[0].counts.drafts)
    assert drafts.num_accepted > 0
    assert metrics("vllm:spec_decode_num_drafts_total") == drafts.num_steps
    assert metrics("vllm:spec_decode_num_draft_tokens_total") == drafts.num_drafted
    assert metrics("vllm:spec_decode_num_accepted_tokens_total") == drafts.num_accepted
    by_place = [metrics("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert sum(by_place) == drafts.num_accepted
    own = {"drafter": "mtp", "part": "answer"}
    assert metrics("onebox:draft_steps_total", **own) == drafts.num_steps
    assert metrics("onebox:draft_tokens_total", **own) == drafts.num_drafted
    assert metrics("onebox:draft_accepted_tokens_total", **own) == drafts.num_accepted
    assert metrics("onebox:draft_tokens_total", drafter="mtp", part="thinking") == 0


def test_the_parts_of_a_requests_time_sum_to_the_whole(engine, scrape):
    list(engine.submit(request("a", max_tokens=50)))
    metrics = scrape()
    queue, prefill, decode, first, mean = (
        metrics(f"vllm:{name}_seconds_sum")
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "time_to_first_token",
            "request_time_per_output_token",
        )
    )
    assert queue >= 0
    assert prefill > 0
    assert math.isclose(queue + prefill, first)
    assert math.isclose(metrics("vllm:inter_token_latency_seconds_sum"), decode)
    assert math.isclose(mean * 49, decode)
    assert first + decode <= metrics("vllm:e2e_request_latency_seconds_sum")


def test_the_time_in_the_queue_ends_when_the_prompts_step_begins(engine, scrape, monkeypatch):
    """A prompt of one step: its Started comes with its first token, and yet its prefill took that step's time."""
    start, now = engine.runner.start, time.monotonic

    def start_for_an_hour(plan):
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3600)
        return start(plan)

    engine.runner.start = start_for_an_hour
    list(engine.submit(request("a", max_tokens=1)))
    metrics = scrape()
    assert metrics("vllm:request_prefill_time_seconds_sum") >= 3600
    assert metrics("vllm:request_queue_time_seconds_sum") < 3600


def test_failures_and_aborts_are_no_successes(engine, scrape):
    list(engine.submit(request("failed", [FAILING])))
    list(engine.submit(Request("late", (1,), SamplingParams(max_tokens=400), timeout_s=1e-9)))
    engine.runner.gate.clear()
    gone = engine.submit(request("gone", max_tokens=400))
    engine.abort("gone")
    engine.runner.gate.set()
    list(gone)
    metrics = scrape()
    for reason in ("stop", "length"):
        assert metrics("vllm:request_success_total", finished_reason=reason) == 0
    for reason in ("failed", "timeout", "abort"):
        assert metrics("onebox:request_unsuccessful_total", reason=reason) == 1
    assert metrics("vllm:e2e_request_latency_seconds_count") == 0


def test_a_request_that_nobody_reads_is_counted_and_a_stop_string_is_a_success(engine, scrape):
    engine.runner.gate.clear()
    handle = engine.submit(request("a", max_tokens=400))
    handle.is_complete = True
    engine.abort("a")
    engine.runner.gate.set()
    wait_until(lambda: scrape()("vllm:request_success_total", finished_reason="stop") == 1)
    assert scrape()("onebox:request_unsuccessful_total", reason="abort") == 0


def test_gauges_show_who_runs_who_waits_and_what_they_hold(engine, scrape):
    engine.runner.gate.clear()
    handles = [engine.submit(request(str(i), [i] * 100)) for i in range(5)]
    # The engine's own stats are of its last step; the first one is under way.
    assert scrape()("vllm:num_requests_running") + scrape()("vllm:num_requests_waiting") <= 5
    engine.runner.gate.set()
    for handle in handles:
        list(handle)
    metrics = scrape()
    assert (metrics("vllm:num_requests_running"), metrics("vllm:num_requests_waiting")) == (0, 0)
    assert metrics("vllm:kv_cache_usage_perc") == 0, "cached prefixes are not in the way"
    assert metrics("onebox:prefix_cache_pages") == engine.stats().prefix.num_pages > 0


def test_a_prompt_asked_again_is_a_hit_in_the_cache(engine, scrape):
    for name in ("first", "second"):
        list(engine.submit(request(name)))
    metrics, prefix = scrape(), engine.stats().prefix
    assert metrics("vllm:prefix_cache_queries_total") == prefix.queried_tokens == 200
    assert metrics("vllm:prefix_cache_hits_total") == prefix.hit_tokens == 64
    assert metrics("onebox:prompt_tokens_computed_total") == 200 - 64
    assert metrics("vllm:prompt_tokens_total") == 200
    assert metrics("vllm:cache_config_info", block_size="64", num_gpu_blocks="30") == 1


def test_what_llm_ds_endpoint_picker_reads_is_one_gauge_each_with_whole_numbers(engine, scrape):
    """It takes the last series of each family and parses these labels as integers."""
    list(engine.submit(request("a")))
    metrics = scrape()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        family = metrics.families[f"vllm:{name}"]
        assert (family.type, [sample.name for sample in family.samples]) == ("gauge", [f"vllm:{name}"])
    labels = metrics.families["vllm:cache_config_info"].samples[0].labels
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == 64 * CONFIG.num_pages
    assert 0 <= metrics("vllm:kv_cache_usage_perc") <= 1


def test_hits_are_told_by_their_tier_and_the_disk_where_there_is_one(engine, scrape, monkeypatch):
    for name in ("first", "second", "third"):
        list(engine.submit(request(name)))
    metrics = scrape()
    assert metrics("onebox:prefix_tier_hits_total", tier="memory") == 2
    assert metrics("onebox:prefix_tier_hit_tokens_total", tier="memory") == 128
    assert not [sample for sample in metrics.samples if "disk" in (sample.name, sample.labels.get("tier"))]
    assert not [name for name in metrics.families if name.startswith("onebox:prefix_disk")]
    disk = DiskStats(1, 64, 300, 200, 1.5, 3, 4, 5, 6, 700, is_writing=False)
    stats = replace(engine.stats(), disk=disk)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    metrics = scrape()
    assert [metrics("onebox:prefix_tier_hits_total", tier=tier) for tier in ("memory", "disk")] == [1, 1]
    assert [metrics("onebox:prefix_tier_hit_tokens_total", tier=tier) for tier in ("memory", "disk")] == [64, 64]
    told = {name.removeprefix("onebox:prefix_disk_"): metrics(name) for name in DISK_NAMES}
    assert told == {
        "read_bytes_total": 300,
        "written_bytes_total": 200,
        "saved_seconds_total": 1.5,
        "damaged_total": 3,
        "dropped_total": 4,
        "evicted_total": 5,
        "entries": 6,
        "bytes": 700,
        "writing": 0,
    }


def test_a_stopped_engine_is_told_as_down(engine, scrape):
    engine.close()
    assert scrape()("onebox:engine_up") == 0


def test_the_machine_is_told_where_it_tells_and_nothing_is_zero_elsewhere(machine_metrics):
    told = SensorReading(
        time.perf_counter(), {"box": 25.4, "GPU 0": 4.5}, {"GPU 0": 38.0}, {"GPU 0 SM": 208.0}, {"GPU 0: any": False}
    )
    found = machine_metrics(told)
    assert {s.labels["source"]: s.value for s in found.families["onebox:power_watts"].samples} == {
        "box": 25.4,
        "GPU 0": 4.5,
    }
    assert found.families["onebox:clock_hertz"].samples[0].value == 208e6
    assert found.families["onebox:throttled"].samples[0].value == 0
    assert found.families["onebox:cpu_seconds"].samples[0].value > 0
    nothing = machine_metrics(SensorReading(time.perf_counter()))
    names = ("power_watts", "temperature_celsius", "clock_hertz", "throttled")
    assert not {f"onebox:{name}" for name in names} & nothing.families.keys()


@pytest.fixture
def machine_metrics():
    """One scrape of a server whose machine tells this."""
    with Engine(FakeRunner(CONFIG), CONFIG) as engine:

        def scraped(reading):
            app = FastAPI()
            app.include_router(metrics_router(Metrics.of_engine(engine, "fake", sensors=SensorWatch(lambda: reading))))
            with TestClient(app) as client:
                return Scraped(client.get("/metrics"))

        yield scraped


def test_the_draft_vocabulary_is_told_where_there_is_one(engine, scrape, monkeypatch):
    assert not [name for name in scrape().families if name.startswith("onebox:draft_vocab")]
    stats = replace(engine.stats(), draft_vocab=DraftVocabStats(40_960, 248_320, 1000, 975, 3))
    monkeypatch.setattr(engine, "stats", lambda: stats)
    metrics = scrape()
    names = ("size", "said_tokens_total", "listed_tokens_total", "renewals_total")
    assert [metrics(f"onebox:draft_vocab_{name}") for name in names] == [40_960, 1000, 975, 3]
