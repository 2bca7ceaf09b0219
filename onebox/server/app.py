"""The HTTP application: its routers, and the guards in front of them."""

from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from onebox import __version__
from onebox.sensors import SensorWatch
from onebox.server.access import ApiKeyGuard, HostGuard, HostNames, MetricsPort, OriginGuard
from onebox.server.addresses import Addresses
from onebox.server.anthropic_errors import AnthropicErrors
from onebox.server.budget import ByteBudget
from onebox.server.endpoints.cache import cache_router
from onebox.server.endpoints.chat import chat_router
from onebox.server.endpoints.completions import completions_router
from onebox.server.endpoints.control import control_router
from onebox.server.endpoints.messages import messages_router
from onebox.server.endpoints.metrics import metrics_router
from onebox.server.endpoints.models import models_router
from onebox.server.endpoints.page import page_router
from onebox.server.endpoints.responses import responses_router
from onebox.server.endpoints.tokens import tokens_router
from onebox.server.errors import ErrorReply, install_error_handlers
from onebox.server.guard import BodyGuard, RootPath
from onebox.server.metrics import Metrics
from onebox.server.request_log import OnFinish, RequestIds, RequestLog
from onebox.server.service import Service
from onebox.server.settings import ServerSettings
from onebox.server.tracing import RequestTraces

__all__ = ["create_app", "create_routers"]

_REFUSAL: dict[str, Any] = {"model": ErrorReply, "description": "A refusal or a failure, in OpenAI's shape."}


def create_app(
    service: Service, settings: ServerSettings | None = None, traces: RequestTraces | None = None
) -> FastAPI:
    """The HTTP application over one engine, which the caller closes, and the traces too."""
    settings = settings or ServerSettings()
    # FastAPI's own API pages load scripts from other hosts; ours is at /docs.
    app = FastAPI(
        title="onebox",
        version=__version__,
        responses={"4XX": _REFUSAL, "5XX": _REFUSAL},
        docs_url=None,
        redoc_url=None,
    )
    install_error_handlers(app)
    metrics = Metrics.of_engine(
        service.engine, service.model_name, service.memory_bytes, service.startup_s, SensorWatch()
    )
    for router in create_routers(service, settings, metrics):
        app.include_router(router)
    _install_guards(app, settings)
    if settings.root_path:
        app.add_middleware(RootPath, prefix=settings.root_path)
    log = RequestLog(service.tokenizer, settings.max_logged_characters)
    # Around all others, so that refusals have an id and a line too.
    on_finish: list[OnFinish] = [lambda record, *_: metrics.count_response(record.shown_status)]
    if traces is not None:
        on_finish.append(partial(traces.tell, service.model_name))
    if settings.logs_requests:
        on_finish.append(log)
    app.add_middleware(RequestIds, on_finish=on_finish)
    return app


def create_routers(service: Service, settings: ServerSettings, metrics: Metrics) -> tuple[APIRouter, ...]:
    """In the order of the table in docs/api.md."""
    return (
        chat_router(service, settings),
        control_router(service),
        completions_router(service, settings),
        responses_router(service, settings),
        messages_router(service, settings),
        cache_router(service),
        tokens_router(service),
        models_router(service),
        metrics_router(metrics),
        page_router(),
    )


def _install_guards(app: FastAPI, settings: ServerSettings) -> None:
    """The last one added runs first: a browser's preflight request carries no key."""
    budget = ByteBudget(settings.max_bodies_bytes, "The bodies")
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes, budget=budget)
    if settings.api_keys:
        app.add_middleware(ApiKeyGuard, api_keys=settings.api_keys, metrics_port=settings.metrics_port)
    else:
        app.add_middleware(Addresses)
        app.add_middleware(OriginGuard, allowed_origins=settings.allowed_origins)
    if settings.allowed_hosts or not settings.api_keys:
        app.add_middleware(HostGuard, names=HostNames(settings.allowed_hosts))
    if settings.metrics_port is not None:
        app.add_middleware(MetricsPort, port=settings.metrics_port)
    app.add_middleware(AnthropicErrors)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
