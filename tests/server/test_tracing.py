"""OpenTelemetry traces: one span a request with what it cost, its phases below it, and nothing private."""

import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from onebox.server.app import create_app
from onebox.server.keys import ApiKey
from onebox.server.settings import ServerSettings
from onebox.server.tracing import RequestTraces, open_traces
from onebox.spec.errors import UsageError

KEYS = ServerSettings(api_keys=(ApiKey("team-a", "sk-hidden"),))
HEADERS = {"authorization": "Bearer sk-hidden", "x-request-id": "mine-1"}
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
CHAT = {"messages": [{"role": "user", "content": "a private question"}], "max_tokens": 50, "temperature": 0.5}


@pytest.fixture
def traced(scripted):
    """A client of a server that says this, and the spans that it made so far."""

    def make(text, **options):
        exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        client = scripted(text, **options)
        client.app = create_app(client.service, KEYS, RequestTraces(provider))
        return client, exporter.get_finished_spans

    return make


def post(client, body, path="/v1/chat/completions", **headers):
    return client.request("POST", path, json=body, headers={**HEADERS, **headers})


def test_a_request_has_a_span_with_its_figures_and_one_for_each_phase(traced):
    client, spans = traced("private answer")
    answer = post(client, CHAT, **PARENT).json()
    whole = {span.name: span for span in spans()}
    assert set(whole) == {"llm_request", "queue", "prefill", "decode"}
    span = whole["llm_request"]
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == PARENT["traceparent"].split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT["traceparent"].split("-")[2]
    found, usage = dict(span.attributes), answer["usage"]
    expected = {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "onebox.request.id": "mine-1",
        "onebox.key.name": "team-a",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": answer["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "onebox.drafts.accepted_tokens": usage["completion_tokens_details"]["accepted_prediction_tokens"],
    }
    assert expected.items() <= found.items()
    phases = [whole[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == span.context.span_id for phase in phases)
    times = [time for phase in phases for time in (phase.start_time, phase.end_time)]
    assert [span.start_time, *times, span.end_time] == sorted([span.start_time, *times, span.end_time])
    inside = sum(found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_inference"))
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert inside <= found["gen_ai.latency.e2e"]


def test_nothing_private_is_in_a_trace(traced):
    client, spans = traced("private answer")
    post(client, {**CHAT, "user": "private user", "stop": ["private stop"]})
    post(client, {"prompt": "private prompt"}, "/v1/completions?key=private")
    post(client, {"messages": "private mistake"})
    shown = " ".join(f"{span.name} {dict(span.attributes)} {span.status.description}" for span in spans())
    assert shown.count("gen_ai.operation.name") == 2
    for secret in ("private", "sk-hidden", "127.0.0.1"):
        assert secret not in shown


def test_refusals_and_failures_have_a_span_and_reading_has_none(traced):
    client, spans = traced("Hi", fails_on=5)
    for path in ("/health", "/metrics", "/v1/models"):
        client.request("GET", path, headers=HEADERS)
    assert not spans()
    post(client, {"messages": []})
    (refused,) = spans()
    assert (refused.attributes["http.response.status_code"], refused.status.status_code) == (400, StatusCode.UNSET)
    assert client.request("POST", "/v1/completions", json={}).status_code == 401
    assert "onebox.key.name" not in spans()[-1].attributes


def test_an_engine_that_fails_is_an_error_of_the_span(traced):
    client, spans = traced("Hi")
    client.service.engine.close()
    assert post(client, CHAT).status_code == 503
    assert spans()[-1].status.status_code is StatusCode.ERROR
    assert spans()[-1].attributes["error.type"] == "503"


@contextmanager
def collector():
    """(URL, requests that it got) of one that takes OTLP over HTTP."""
    taken = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("by", ["flag", "flag without a path", "variable"])
def test_spans_reach_a_collector_before_the_end(scripted, monkeypatch, by):
    client = scripted("Hi")
    with collector() as (url, taken):
        if by == "variable":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            monkeypatch.setenv("OTEL_SERVICE_NAME", "box-7")
        if by != "flag":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        endpoint = {"flag": f"{url}/v1/traces", "flag without a path": url, "variable": None}[by]
        traces = open_traces(endpoint)
        client.app = create_app(client.service, None, traces)
        assert client.complete().status_code == 200
        traces.close()
    ((path, request),) = taken
    assert path == "/v1/traces"
    (spans,) = request.resource_spans
    resource = {item.key: item.value.string_value for item in spans.resource.attributes}
    assert resource["service.name"] == ("box-7" if by == "variable" else "onebox")
    names = sorted(span.name for scope in spans.scope_spans for span in scope.spans)
    assert names == ["decode", "llm_request", "prefill", "queue"]


def test_without_an_endpoint_or_where_it_is_switched_off_there_are_no_traces(monkeypatch):
    assert open_traces(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_traces(None) is None


@pytest.mark.parametrize(
    ("endpoint", "variables", "says"),
    [
        ("http://x:port", {}, "is no address for traces"),
        ("http://x:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}, "it must be grpc or http/protobuf"),
        ("grpc://x", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "must begin with http"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused(monkeypatch, endpoint, variables, says):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        open_traces(endpoint)


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"]
)
def test_without_the_library_the_flag_is_refused_and_a_variable_only_told_of(monkeypatch, caplog, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"not installed .*pip install 'onebox\[otel\]'"):
        open_traces("grpc://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://localhost:4317")
    assert open_traces(None) is None
    assert "no traces are sent" in caplog.text
