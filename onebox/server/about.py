"""What is served and how it is: GET /v1/models, /health and /version."""

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from onebox import __version__
from onebox.engine.api import HealthStatus
from onebox.server.complete import Service

__all__ = ["about_router"]


def about_router(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def model() -> dict[str, Any]:
        name, limit = service.model_name, service.engine.config.max_model_len
        head = {"id": name, "object": "model", "created": created, "owned_by": "onebox", "root": name, "parent": None}
        return {**head, "max_model_len": limit, "input_modalities": ["text", *service.media.kinds]}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.refuse_other_model(name)
        return model()

    @router.get("/health")
    async def health() -> JSONResponse:
        health = service.engine.health()
        is_ok = health.status is HealthStatus.OK
        body = {"status": health.status.value, "message": health.message, "num_restarts": health.num_restarts}
        return JSONResponse(body, 200 if is_ok else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return router
