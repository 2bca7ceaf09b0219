"""The fleet's own HTTP: one page of all members, its figures as JSON, and the commands that drain and roll.

It listens on this machine only. What changes something is asked for with a header that a foreign page cannot send.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from onebox.fleet.config import read_fleet_config
from onebox.spec.errors import OneboxError

if TYPE_CHECKING:
    from onebox.fleet.fleet import Fleet

__all__ = ["ADMIN_HEADER", "admin_app"]

ADMIN_HEADER = "x-onebox-fleet"
_HOSTS = ("127.0.0.1", "localhost")
_PAGE = Path(__file__).parent / "static" / "page.html"


def admin_app(fleet: "Fleet") -> FastAPI:
    app = FastAPI(title="onebox fleet", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        # A name that somebody else's name server resolves to this machine is not ours.
        if request.headers.get("host", "").rpartition(":")[0] not in _HOSTS:
            return JSONResponse({"error": "This address is for 127.0.0.1 only."}, 421)
        if request.method != "GET" and ADMIN_HEADER not in request.headers:
            return JSONResponse({"error": f"Send the header {ADMIN_HEADER}."}, 403)
        answer: Response = await call_next(request)
        return answer

    @app.exception_handler(OneboxError)
    async def refuse(_: Request, error: OneboxError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return _PAGE.read_text(encoding="utf-8")

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return fleet.status()

    @app.post("/members/{name}/drain")
    async def drain(name: str) -> dict[str, Any]:
        member = fleet.member(name)
        member.drain()
        return member.status()

    @app.post("/members/{name}/resume")
    async def resume(name: str) -> dict[str, Any]:
        member = fleet.member(name)
        member.resume()
        return member.status()

    @app.post("/roll")
    async def roll(names: str = "", in_place: bool = False) -> dict[str, Any]:
        """Members by the fleet's file as it is now: its start lines may name another version."""
        config = read_fleet_config(fleet.config.path)
        return fleet.begin_roll(config, [name for name in names.split(",") if name], in_place=in_place).status()

    return app
