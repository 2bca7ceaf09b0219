"""Traces of requests for OpenTelemetry, where its library is installed: one span a request, made when it has ended.

Names of spans and attributes are those of vLLM and of OpenTelemetry's conventions for generative AI. Attributes have
counts, times and names; nothing of what was asked or answered, no keys, no addresses.
"""

import importlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from onebox import __version__
from onebox.server.record import HttpRecord
from onebox.server.request_log import READING_METHODS, shown_path
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["RequestTraces", "open_traces"]

_log = logging.getLogger(__name__)

FLAG = "--otlp-traces-endpoint"
INSTALL = "install it with `pip install 'onebox[otel]'`"
CLOSE_S = 2.0
"""For the last spans to be sent when the server ends, whether or not a collector answers."""
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP_PORT = 4318
_OPERATIONS = {"/v1/completions": "text_completion"}


class RequestTraces:
    """Makes the spans of requests that ask for work."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("onebox", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, model_name: str, record: HttpRecord, headers: Mapping[str, str], now: float) -> None:
        """Of one request that has ended: at `now`, on the clock of `record.began`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if record.method in READING_METHODS:
            return
        clock = _Clock(record)
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier=headers),
            kind=SpanKind.SERVER,
            start_time=clock.nanoseconds(record.began),
            attributes={**_http_attributes(record), **_answer_attributes(record, model_name, now)},
        )
        for name, begin, end in _phases(record, now):
            child = self._tracer.start_span(
                name, context=set_span_in_context(span), start_time=clock.nanoseconds(begin)
            )
            child.end(clock.nanoseconds(end))
        if record.status >= 500 or record.error:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", record.error or str(record.status))
        span.end(clock.nanoseconds(now))

    def close(self) -> None:
        """Sends what is left, for at most CLOSE_S seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="onebox-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Clock:
    """time.monotonic's times as nanoseconds since 1970, so that the spans of a request never overlap wrongly."""

    def __init__(self, record: HttpRecord) -> None:
        self._offset = record.began_at - record.began

    def nanoseconds(self, at: float) -> int:
        return int((at + self._offset) * 1e9)


def _phases(record: HttpRecord, now: float) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of what has begun: waiting for a slot, the prompt, the answer."""
    submitted, started, first = record.submitted_at, record.started_at, record.first_token_at
    if submitted is not None:
        yield "queue", submitted, max(submitted, started or now)
    if started is not None:
        yield "prefill", started, max(started, first or now)
    if first is not None:
        yield "decode", first, max(first, now)


def _http_attributes(record: HttpRecord) -> dict[str, Any]:
    found = {
        "http.request.method": record.method[:16],
        "url.path": shown_path(record),
        "http.response.status_code": record.shown_status,
        "onebox.request.id": record.request_id,
        "onebox.key.name": record.key_name,
    }
    return {name: value for name, value in found.items() if value is not None}


def _answer_attributes(record: HttpRecord, model_name: str, now: float) -> dict[str, Any]:
    if record.answers is None:
        return {}
    usage, sampling = record.answers.usage, record.answers.answers[0].prompt.sampling
    seconds = {name: end - begin for name, begin, end in _phases(record, now)}
    found = {
        "gen_ai.operation.name": _OPERATIONS.get(record.path, "chat"),
        "gen_ai.provider.name": "onebox",
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": record.answers.request_id,
        "gen_ai.response.id": record.answers.request_id,
        "gen_ai.request.n": record.answers.n,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "gen_ai.usage.num_sequences": len(record.answers.answers),
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "onebox.cache.tier": usage.cached_tier,
        "onebox.drafts.drafted_tokens": usage.accepted_draft_tokens + usage.rejected_draft_tokens,
        "onebox.drafts.accepted_tokens": usage.accepted_draft_tokens,
        "gen_ai.latency.e2e": now - record.began,
        "gen_ai.latency.time_to_first_token": record.first_token_at and record.first_token_at - record.began,
        "gen_ai.latency.time_in_queue": seconds.get("queue"),
        "gen_ai.latency.time_in_model_prefill": seconds.get("prefill"),
        "gen_ai.latency.time_in_model_decode": seconds.get("decode"),
        "gen_ai.latency.time_in_model_inference": seconds.get("prefill", 0.0) + seconds.get("decode", 0.0),
    }
    return {name: value for name, value in found.items() if value is not None}


def open_traces(endpoint: str | None) -> RequestTraces | None:
    """Traces that go to the endpoint, or to the one that OTEL_* variables name; None without either.

    Refuses an endpoint where the library is missing; a variable that is set for other programs is only told of.
    """
    if endpoint is None and not (any(os.environ.get(name) for name in _ENDPOINTS) and _is_enabled()):
        return None
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        return RequestTraces(provider)
    except ImportError as error:
        missing = f"the library of OpenTelemetry is not installed ({error.name})"
        if endpoint is None:
            name = next(name for name in _ENDPOINTS if os.environ.get(name))
            _log.warning("%s is set, but no traces are sent: %s; %s", name, missing, INSTALL)
            return None
        raise UsageError(f"{FLAG} is given, and {missing}; {INSTALL}.") from None


def _is_enabled() -> bool:
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_off and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"


def _exporter(endpoint: str | None) -> Any:
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), None)
    target = endpoint or next(os.environ[name] for name in _ENDPOINTS if os.environ.get(name))
    try:
        parts = urlsplit(target if "//" in target else f"//{target}")
        is_http = protocol is None and (parts.port == _HTTP_PORT or parts.path.strip("/") != "")
    except ValueError as error:
        raise UsageError(f"{target} is no address for traces: {error}.") from None
    protocol = protocol or ("http/protobuf" if is_http else "grpc")
    if protocol not in _EXPORTERS:
        raise UsageError(f"The protocol of traces is {protocol} (OTEL_*_PROTOCOL); it must be grpc or http/protobuf.")
    make = importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter
    if endpoint is None:
        return make()
    if protocol == "grpc":
        return make(endpoint=endpoint, insecure=parts.scheme != "https")
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"{FLAG} {endpoint} must begin with http:// or https:// for the protocol http/protobuf.")
    return make(endpoint=endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces")


def _resource() -> Any:
    from opentelemetry.sdk.resources import Resource

    given = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({"service.version": __version__} | ({} if given else {"service.name": "onebox"}))
