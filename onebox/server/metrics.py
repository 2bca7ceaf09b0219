"""The metrics behind GET /metrics, under the names that dashboards for vLLM read.

Two sources. The engine's counters and gauges are read from its stats at each scrape. Times and outcomes of requests
are observed as their events arrive, whether or not a client still reads. A request is a success if it ended at an end
token, a stop string or its token limit. Metrics that vLLM does not have are called `onebox:`.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onebox.engine.api import (
    PAGE_TOKENS,
    AcceptanceCounts,
    CacheTier,
    DiskStats,
    DraftVocabStats,
    EngineClient,
    EngineStats,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    HealthStatus,
    Request,
    Started,
    TextPart,
    Tokens,
    Watch,
)
from onebox.sensors import SensorWatch
from onebox.server.machine import MachineCollector

__all__ = ["Metrics"]

# vLLM's buckets, with finer ones below 10 ms, the range of a single sequence's step.
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_FIRST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token.", _FIRST_SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two deliveries of one request's tokens.", _TOKEN_SECONDS),
    "vllm:time_per_output_token_seconds": ("The same under its older name.", _TOKEN_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("A request's mean time per token after the first.", _TOKEN_SECONDS),
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its end.", _REQUEST_SECONDS),
    "vllm:request_queue_time_seconds": ("From arrival to the step that began the prompt.", _REQUEST_SECONDS),
    "vllm:request_prefill_time_seconds": ("From there to the first token.", _REQUEST_SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _REQUEST_SECONDS),
    "vllm:request_inference_time_seconds": ("Prefill and decode together.", _REQUEST_SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of a finished request's prompt.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens that a finished request made.", _TOKENS),
}
_SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH)
_FAILURES = [reason.value for reason in FinishReason if reason not in _SUCCESSES]


class Metrics:
    """All metrics of one engine, in their own registry."""

    def __init__(self, engine: EngineClient, model_name: str, sensors: SensorWatch | None = None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        if sensors is not None:
            self.registry.register(MachineCollector(sensors, model_name))
        self._model_name = model_name
        self._histograms = {
            name: Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        prompt_tokens = Counter(
            "vllm:prompt_tokens", "Tokens of prompts read.", ("model_name",), registry=self.registry
        )
        self._prompt_tokens = prompt_tokens.labels(model_name)
        self._by_key = Counter(
            "onebox:requests_by_key", "Requests accepted, by API key.", ("model_name", "key"), registry=self.registry
        )
        self._successes = self._outcomes(
            "vllm:request_success", "Requests answered.", "finished_reason", [reason.value for reason in _SUCCESSES]
        )
        self._failures = self._outcomes(
            "onebox:request_unsuccessful", "Requests that ended otherwise.", "reason", ["failed", *_FAILURES]
        )

        self._responses = Counter(
            "onebox:http_responses", "HTTP requests by status.", ("model_name", "status"), registry=self.registry
        )

    @classmethod
    def of_engine(
        cls,
        engine: EngineClient,
        model_name: str,
        memory_bytes: Mapping[str, int] | None = None,
        startup_s: Mapping[str, float] | None = None,
        sensors: SensorWatch | None = None,
    ) -> "Metrics":
        """Observes the engine's requests from now on.

        `memory_bytes` is the memory plan by part; `startup_s` are the seconds of each phase of the start; without
        `sensors` there is nothing about the machine.
        """
        metrics = cls(engine, model_name, sensors)
        engine.observer = metrics.watch
        metrics.set_constant("onebox:memory_bytes", "The memory plan, by part.", "part", memory_bytes or {})
        metrics.set_constant("onebox:startup_seconds", "The start, by phase.", "phase", startup_s or {})
        return metrics

    def _outcomes(self, name: str, text: str, label: str, values: list[str]) -> dict[str, Counter]:
        """One counter per value, all present from the start: what never happened is 0, not absent."""
        counter = Counter(name, text, ("model_name", label), registry=self.registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def set_constant(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        """A gauge whose values do not change; none where there are no values."""
        if values:
            gauge = Gauge(name, text, ["model_name", label], registry=self.registry)
            for key, value in values.items():
                gauge.labels(self._model_name, key).set(value)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def watch(self, request: Request) -> Watch:
        """Called when a request is accepted; the result is called with each of its events."""
        if request.client and request.client.is_key:
            self._by_key.labels(self._model_name, request.client.name).inc()
        return _RequestWatch(self, len(request.prompt))

    def count_response(self, status: int) -> None:
        """Called when an HTTP request has ended, also for those that were refused."""
        self._responses.labels(self._model_name, str(status)).inc()

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def count_success(self, reason: FinishReason) -> None:
        self._successes[reason.value].inc()

    def count_failure(self, reason: str) -> None:
        self._failures[reason].inc()


class _RequestWatch:
    """Observes one request from its arrival to its end."""

    def __init__(self, metrics: Metrics, num_prompt: int) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._arrived = self._started = self._first = self._last = time.monotonic()
        self._has_tokens = False

    def __call__(self, event: Event, began: float) -> None:
        match event:
            case Started():
                self._started = began
                self._metrics.observe("vllm:request_queue_time_seconds", began - self._arrived)
            case Tokens():
                self._take_tokens(time.monotonic())
            case Finished() if event.reason in _SUCCESSES:
                self._finish(event, time.monotonic())
            case Finished():
                self._metrics.count_failure(event.reason.value)
            case Failed():
                self._metrics.count_failure("failed")

    def _take_tokens(self, now: float) -> None:
        if self._has_tokens:
            self._metrics.observe("vllm:inter_token_latency_seconds", now - self._last)
            self._metrics.observe("vllm:time_per_output_token_seconds", now - self._last)
        else:
            self._has_tokens, self._first = True, now
            self._metrics.count_prompt(self._num_prompt)
            self._metrics.observe("vllm:time_to_first_token_seconds", now - self._arrived)
            self._metrics.observe("vllm:request_prefill_time_seconds", now - self._started)
        self._last = now

    def _finish(self, event: Finished, now: float) -> None:
        if not self._has_tokens:
            # Its first token was its end token, which is not delivered.
            self._take_tokens(now)
        observe, num_generated = self._metrics.observe, event.counts.completion_tokens
        self._metrics.count_success(event.reason)
        observe("vllm:e2e_request_latency_seconds", now - self._arrived)
        observe("vllm:request_decode_time_seconds", self._last - self._first)
        observe("vllm:request_inference_time_seconds", self._last - self._started)
        observe("vllm:request_prompt_tokens", event.counts.prompt_tokens)
        observe("vllm:request_generation_tokens", num_generated)
        if num_generated > 1:
            observe("vllm:request_time_per_output_token_seconds", (self._last - self._first) / (num_generated - 1))


class _EngineCollector(Collector):
    """The engine's stats, read at each scrape."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        health = self._engine.health()
        yield self._gauge("onebox:engine_up", "1 while requests are taken.", health.status.takes_requests)
        is_idle = health.status is HealthStatus.IDLE
        yield self._gauge("onebox:engine_idle", "1 while the engine's memory is released.", is_idle)
        yield self._counter(
            "onebox:engine_restarts", "Times that the engine died and was started.", health.num_restarts
        )
        try:
            stats = self._engine.stats()
        except EngineStoppedError:
            return
        yield from self._load(stats)
        yield from self._totals(stats)
        yield from self._drafts(stats)
        yield from self._tiers(stats)
        if stats.disk:
            yield from self._disk(stats.disk)
        if stats.draft_vocab:
            yield from self._draft_vocab(stats.draft_vocab)
        yield self._cache_config()

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        cached = stats.prefix.num_pages
        used = stats.num_pages - stats.num_free_pages - cached
        yield self._gauge("vllm:num_requests_running", "Requests that are computed.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot or for pages.", stats.num_waiting)
        usage = "Share of the KV pages that requests hold and no cached prefix does; 1 is all of them."
        yield self._gauge("vllm:kv_cache_usage_perc", usage, used / stats.num_pages)
        yield self._gauge("onebox:prefix_cache_pages", "KV pages that hold cached prefixes.", cached)
        states = stats.prefix.num_checkpoints
        yield self._gauge("onebox:prefix_cache_states", "Recurrent states of cached prefixes.", states)

    def _totals(self, stats: EngineStats) -> Iterator[Metric]:
        totals, prefix = stats.totals, stats.prefix
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", prefix.queried_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", prefix.hit_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens made.", totals.completion_tokens)
        yield self._counter("vllm:num_preemptions", "Requests sent back to the queue.", totals.num_preempted)
        yield self._counter("onebox:prompt_tokens_computed", "Prompt tokens computed.", totals.prompt_tokens)
        yield self._counter("onebox:engine_steps", "Steps of the engine.", totals.num_steps)

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        drafts = stats.totals.drafts
        name = "vllm:spec_decode_num"
        yield self._counter(f"{name}_drafts", "Steps of a request with drafts.", drafts.num_steps)
        yield self._counter(f"{name}_draft_tokens", "Tokens drafted.", drafts.num_drafted)
        yield self._counter(f"{name}_accepted_tokens", "Drafted tokens kept.", drafts.num_accepted)
        labels = ("model_name", "position")
        by_place = CounterMetricFamily(f"{name}_accepted_tokens_per_pos", "Drafts kept, by their place.", labels=labels)
        for place in range(self._engine.config.speculation.max_drafts):
            kept = drafts.accepted_by_position[place] if place < len(drafts.accepted_by_position) else 0
            by_place.add_metric((self._model_name, str(place)), kept)
        yield by_place
        yield from self._draft_classes(stats)

    def _draft_classes(self, stats: EngineStats) -> Iterator[Metric]:
        """By who drafted and for which part of the answer: those that can occur, from the start on."""
        labels, nothing = ("model_name", "drafter", "part"), AcceptanceCounts()
        speculation, found = self._engine.config.speculation, stats.totals.drafts_by_class
        classes = [(drafter, part) for drafter in speculation.drafters for part in TextPart]
        figures: dict[str, tuple[str, Callable[[AcceptanceCounts], int]]] = {
            "steps": ("Steps of a request with drafts", lambda counts: counts.num_steps),
            "tokens": ("Tokens drafted", lambda counts: counts.num_drafted),
            "accepted_tokens": ("Drafted tokens kept", lambda counts: counts.num_accepted),
        }
        for name, (text, figure) in figures.items():
            text = f"{text}, by drafter and part of the answer."
            family = CounterMetricFamily(f"onebox:draft_{name}", text, labels=labels)
            for drafter, part in classes:
                family.add_metric(
                    (self._model_name, drafter.value, part.value), figure(found.get((drafter, part), nothing))
                )
            yield family

    def _draft_vocab(self, vocab: DraftVocabStats) -> Iterator[Metric]:
        name = "onebox:draft_vocab"
        yield self._gauge(f"{name}_size", "Tokens that drafts of the MTP head are chosen from.", vocab.size)
        said = "Tokens of answers; with those that were listed, the draft vocabulary's coverage."
        yield self._counter(f"{name}_said_tokens", said, vocab.num_said)
        yield self._counter(f"{name}_listed_tokens", "Tokens of answers that were listed.", vocab.num_listed)
        yield self._counter(f"{name}_renewals", "Times that the list was renewed from counts.", vocab.num_renewals)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """What was found, by where it was: on disk only where there is a directory for it."""
        disk, prefix = stats.disk or DiskStats(), stats.prefix
        figures = {
            "prefix_tier_hits": ("Prompts with a cached prefix", disk.num_hits, prefix.num_hits),
            "prefix_tier_hit_tokens": ("Prompt tokens found", disk.hit_tokens, prefix.hit_tokens),
        }
        for name, (text, on_disk, all_hits) in figures.items():
            labels = ("model_name", "tier")
            family = CounterMetricFamily(f"onebox:{name}", f"{text}, by the tier that held it.", labels=labels)
            family.add_metric((self._model_name, CacheTier.MEMORY), all_hits - on_disk)
            if stats.disk:
                family.add_metric((self._model_name, CacheTier.DISK), on_disk)
            yield family

    def _disk(self, disk: DiskStats) -> Iterator[Metric]:
        name = "onebox:prefix_disk"
        yield self._counter(f"{name}_read_bytes", "Bytes of prefixes read from disk.", disk.read_bytes)
        yield self._counter(f"{name}_written_bytes", "Bytes of prefixes written to disk.", disk.written_bytes)
        saved = "What computing the prefixes found on disk would have taken, less what reading them took."
        yield self._counter(f"{name}_saved_seconds", saved, disk.saved_s)
        yield self._counter(f"{name}_damaged", "Files that were torn, changed or missing: misses.", disk.num_damaged)
        yield self._counter(f"{name}_dropped", "Prefixes that were not written.", disk.num_dropped)
        yield self._counter(f"{name}_evicted", "Prefixes removed to keep within the limit.", disk.num_evicted)
        yield self._gauge(f"{name}_entries", "Prefixes of this model on disk.", disk.num_entries)
        yield self._gauge(f"{name}_bytes", "Bytes of this model's prefixes on disk.", disk.used_bytes)
        yield self._gauge(f"{name}_writing", "0 while the disk is full or cannot be written.", disk.is_writing)

    def _cache_config(self) -> Metric:
        config = self._engine.config
        facts = {
            "model_name": self._model_name,
            "block_size": str(PAGE_TOKENS),
            "num_gpu_blocks": str(config.num_pages),
            "enable_prefix_caching": str(config.num_checkpoints > 0),
            "max_model_len": str(config.max_model_len),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "What the KV cache is like.", labels=tuple(facts))
        info.add_metric(tuple(facts.values()), 1)
        return info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family
