"""Every query of the Grafana dashboard names metrics and labels that a running server's /metrics has."""

import re
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onebox.engine.api import DiskStats, DraftVocabStats, SpeculationConfig, SpeculationMethod
from onebox.sensors import SensorReading, SensorWatch
from onebox.server import app as application
from onebox.server.keys import plain_keys
from onebox.server.settings import ServerSettings
from tests.server.conftest import Client
from tests.server.dashboard import dashboard, panels, queries, variables
from tests.server.test_guard import BODY

ADDED = {"instance", "job"}
"""Labels that Prometheus adds itself."""
OVER_COUNTERS = {"rate", "increase"}


def parsed(query):
    import promql_parser

    return promql_parser.parse(query)


class Exported:
    """What a server's /metrics has, by the names of samples."""

    def __init__(self, text):
        self.labels, self.values, self.counters = {}, {}, set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.labels[sample.name] = set(sample.labels)
                for label, value in sample.labels.items():
                    self.values.setdefault((sample.name, label), set()).add(value)
                if family.type in ("counter", "histogram"):
                    self.counters.add(sample.name)

    def labels_of(self, expression):
        """The labels that an expression's result has; None for a number. Fails where something is not exported."""
        match type(expression).__name__:
            case "VectorSelector":
                return self._selected(expression)
            case "MatrixSelector":
                return self._selected(expression.vector_selector)
            case "ParenExpr" | "UnaryExpr":
                return self.labels_of(expression.expr)
            case "NumberLiteral" | "StringLiteral":
                return None
            case "Call":
                return self._called(expression)
            case "AggregateExpr":
                return self._aggregated(expression)
            case "BinaryExpr":
                return self._combined(expression)
        raise AssertionError(f"{expression} is not understood")

    def _selected(self, selector):
        assert selector.name in self.labels, f"/metrics has no {selector.name}"
        labels = self.labels[selector.name] | ADDED
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
            values = self.values.get((selector.name, matcher.name), {"127.0.0.1:9400"})
            if str(matcher.op) in ("MatchOp.Re", "MatchOp.NotRe"):
                found = any(re.fullmatch(matcher.value, value) for value in values)
            else:
                found = matcher.value in values
            assert found, f"no {matcher.name} of {selector.name} is {matcher.value}"
        return labels

    def _called(self, call):
        (labels,) = [found for found in map(self.labels_of, call.args) if found is not None]
        if call.func.name in OVER_COUNTERS:
            assert call.args[0].vector_selector.name in self.counters, f"{call.args[0]} is no counter"
        if call.func.name == "histogram_quantile":
            assert "le" in labels
            return labels - {"le"}
        return labels

    def _aggregated(self, aggregate):
        kept = set(aggregate.modifier.labels) if aggregate.modifier else set()
        assert kept <= self.labels_of(aggregate.expr), f"{aggregate} keeps labels that are not there"
        return kept

    def _combined(self, binary):
        left, right = self.labels_of(binary.lhs), self.labels_of(binary.rhs)
        if left is None or right is None:
            return left if right is None else right
        matching = binary.modifier.matching if binary.modifier else None
        ignored = set(matching.labels) if matching else set()
        assert left - ignored == right - ignored, f"the sides of {binary} do not match"
        return left


@pytest.fixture
def exported(scripted, monkeypatch):
    """Of a server on which everything can be told, after an answer and a refusal."""
    reading = SensorReading(time.perf_counter(), {"box": 25.4}, {"GPU 0": 38.0}, {"GPU 0 SM": 208.0}, {"GPU 0": False})
    monkeypatch.setattr(application, "SensorWatch", lambda: SensorWatch(lambda: reading))
    service = scripted("Hi", speculation=SpeculationConfig(SpeculationMethod.MTP, 3)).service
    service = replace(service, memory_bytes={"weights": 1}, startup_s={"weights": 1.0})
    stats = replace(service.engine.stats(), disk=DiskStats(), draft_vocab=DraftVocabStats(1, 2, 3, 2, 1))
    client = Client(service, ServerSettings(api_keys=tuple(plain_keys(["sk-one"]))))
    key = {"Authorization": "Bearer sk-one"}
    assert client.request("POST", "/v1/completions", json=BODY, headers=key).status_code == 200
    assert client.request("POST", "/v1/completions", json={}, headers=key).status_code == 400
    monkeypatch.setattr(service.engine, "stats", lambda: stats)
    return Exported(client.request("GET", "/metrics", headers=key).text)


def test_every_query_finds_its_metrics_and_labels(exported):
    for query in queries():
        labels = exported.labels_of(parsed(query.expression))
        assert query.legend_labels <= labels, query
    for selector, label in variables().values():
        assert label in exported.labels_of(parsed(selector))
    for wrong in (
        "sum(onebox:engines_up)",
        'onebox:engine_up{model="x"}',
        "sum by (draughter) (onebox:draft_tokens_total)",
        "rate(onebox:engine_up[1m])",
        'onebox:request_unsuccessful_total{reason="rain"}',
        "onebox:draft_tokens_total / onebox:draft_vocab_size",
    ):
        with pytest.raises(AssertionError):
            exported.labels_of(parsed(wrong))


def test_the_dashboard_shows_what_an_owner_asks_for():
    shown = " ".join(query.expression for query in queries())
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"),
        *("vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_bucket", "onebox:engine_up"),
        *("vllm:inter_token_latency_seconds_bucket", "vllm:prefix_cache_hits_total", "vllm:kv_cache_usage_perc"),
        *("onebox:draft_accepted_tokens_total", "onebox:memory_bytes", "onebox:request_unsuccessful_total"),
        *("onebox:http_responses_total", "onebox:engine_idle", "onebox:engine_restarts_total"),
    ):
        assert name in shown


def test_panels_have_a_place_of_their_own_and_one_source():
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    sources = [panel["datasource"] for panel in panels()]
    sources += [target["datasource"] for panel in panels() for target in panel["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
