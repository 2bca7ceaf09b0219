"""GET /v1/models, /health and /version."""

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from onebox import __version__
from onebox.server.service import Service

__all__ = ["models_router"]


def models_router(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def model(name: str) -> dict[str, Any]:
        root, limit = service.model_name, service.engine.config.max_model_len
        head = {"id": name, "object": "model", "created": created, "owned_by": "onebox", "root": root, "parent": None}
        facts = {"max_model_len": limit, "input_modalities": ["text", *service.media.kinds]}
        return {**head, **facts, "fingerprint": service.fingerprint}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, its context, what it reads, and a fingerprint of all that decides its answers"""
        return {"object": "list", "data": [model(name) for name in service.names]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The same of one model by name"""
        service.refuse_other_model(name)
        return model(name if name in service.names else service.model_name)

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are accepted, also by an engine that is idle and starts for the next one; 503 otherwise"""
        health = service.engine.health()
        is_ok = health.status.takes_requests
        body = {"status": health.status.value, "message": health.message, "num_restarts": health.num_restarts}
        return JSONResponse(body, 200 if is_ok else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of onebox; no key needed"""
        return {"version": __version__}

    return router
