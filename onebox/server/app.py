"""The HTTP application: a list of routers, and what stands before them."""

from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from onebox import __version__
from onebox.server.about import about_router
from onebox.server.anthropic import anthropic_router
from onebox.server.anthropic_errors import AnthropicErrors
from onebox.server.chat import chat_router
from onebox.server.complete import Service
from onebox.server.completions import completions_router
from onebox.server.errors import ErrorReply, install_error_handlers
from onebox.server.guard import ApiKeyGuard, BodyGuard
from onebox.server.metrics import metrics_router
from onebox.server.page import page_router
from onebox.server.responses import responses_router
from onebox.server.settings import ServerSettings
from onebox.server.tokens import tokens_router

__all__ = ["create_app"]

_REFUSAL: dict[str, Any] = {"model": ErrorReply, "description": "A refusal or a failure, in OpenAI's shape."}


def create_app(service: Service, settings: ServerSettings | None = None) -> FastAPI:
    """The HTTP application over one engine. Closing the engine is its maker's affair."""
    settings = settings or ServerSettings()
    # FastAPI's own pages of the API fetch their scripts from elsewhere; ours is at /docs.
    app = FastAPI(
        title="onebox",
        version=__version__,
        responses={"4XX": _REFUSAL, "5XX": _REFUSAL},
        docs_url=None,
        redoc_url=None,
    )
    install_error_handlers(app)
    for router in (
        chat_router(service, settings),
        completions_router(service, settings),
        responses_router(service, settings),
        anthropic_router(service, settings),
        tokens_router(service),
        about_router(service),
        metrics_router(service.engine, service.model_name, service.memory_bytes, service.startup_s),
        page_router(),
    ):
        app.include_router(router)
    _install_guards(app, settings)
    return app


def _install_guards(app: FastAPI, settings: ServerSettings) -> None:
    """The last one added is asked first: a browser's preflight carries no key."""
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=settings.api_key)
    app.add_middleware(AnthropicErrors)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
