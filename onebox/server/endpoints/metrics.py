"""GET /metrics."""

from collections.abc import Mapping

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from onebox.engine.api import EngineClient
from onebox.sensors import SensorWatch
from onebox.server.metrics import Metrics

__all__ = ["metrics_router"]


def metrics_router(
    engine: EngineClient,
    model_name: str,
    memory_bytes: Mapping[str, int] | None = None,
    startup_s: Mapping[str, float] | None = None,
    sensors: SensorWatch | None = None,
) -> APIRouter:
    """Observes the engine's requests from now on.

    `memory_bytes` is the memory plan by part; `startup_s` are the seconds of each phase of the start; without `sensors`
    there is nothing about the machine.
    """
    metrics = Metrics(engine, model_name, sensors)
    engine.observer = metrics.watch
    metrics.set_constant("onebox:memory_bytes", "The memory plan, by part.", "part", memory_bytes or {})
    metrics.set_constant("onebox:startup_seconds", "The start, by phase.", "phase", startup_s or {})
    router = APIRouter()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def read_metrics() -> Response:
        """Prometheus metrics of the engine and its requests, under vLLM's names"""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
