"""GET /metrics."""

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from onebox.server.metrics import Metrics

__all__ = ["metrics_router"]


def metrics_router(metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def read_metrics() -> Response:
        """Prometheus metrics of the engine and its requests, under vLLM's names"""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
