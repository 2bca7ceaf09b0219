"""POST /v1/chat/completions/control: changes an answer that is being computed."""

from typing import Literal

from fastapi import APIRouter

from onebox.server.body import JsonRoute
from onebox.server.errors import ResponseNotFoundError, excerpt
from onebox.server.schemas.common import Json, Name, Strict
from onebox.server.service import Service

__all__ = ["control_router"]


class ControlRequest(Strict):
    id: Name
    """Of the answer, of any dialect, or the request's x-request-id."""
    action: Literal["reasoning_end"]


def control_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions/control")
    async def control(body: ControlRequest) -> Json:
        """Ends the thinking of an answer that is being computed: `reasoning_end`"""
        answers = service.running.find(body.id)
        if answers is None:
            raise ResponseNotFoundError(f"No answer with the id {excerpt(body.id)} is being computed here.")
        num_ended = sum(answer.end_thinking() for answer in answers.answers)
        return {"id": body.id, "action": body.action, "num_ended": num_ended}

    return router
