"""GET / and /docs: the chat page, the API page and their files, read once and served from memory.

Everything the pages need comes from here. Their policy lets the browser connect to this server alone, so that a
script, an image or a form in the model's output cannot send what was typed elsewhere. The pages hold no secrets and
load without the API key; the API that they call asks for it.
"""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

__all__ = ["page_router"]

_DIRECTORY = Path(__file__).parents[1] / "static"
_PREFIX = "/static/"
_VENDORED = "vendor/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",  # licences of the libraries
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",  # attached images are data URLs
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes HTML in one place, which cleans it: any other would raise an error.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_REVALIDATED = "no-cache"
"""After an update no page runs with files of another version."""
_FOR_EVER = "public, max-age=31536000, immutable"
"""A library's folder has its version in its name: what was there once never changes."""


def page_router() -> APIRouter:
    """The pages and their files under /static/; not part of the API's OpenAPI description."""
    paths = [path for path in sorted(_DIRECTORY.rglob("*")) if path.suffix in _TYPES]
    files = {name: _File(name) for name in (path.relative_to(_DIRECTORY).as_posix() for path in paths)}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """The chat page; no key needed to load it"""
        return files["index.html"].response(request)

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(request: Request) -> Response:
        """The page of the API: every path and every field"""
        return files["docs.html"].response(request)

    @router.api_route(_PREFIX + "{name:path}", methods=["GET", "HEAD"])
    async def static(name: str, request: Request) -> Response:
        """Files of the pages"""
        if name not in files:
            raise HTTPException(404, "The page has no such file")
        return files[name].response(request)

    return router


class _File:
    """One file with its ETag."""

    def __init__(self, name: str) -> None:
        path = _DIRECTORY / name
        self._body = path.read_bytes()
        self._type = _TYPES[path.suffix]
        self._caching = _FOR_EVER if name.startswith(_VENDORED) else _REVALIDATED
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "Cache-Control": self._caching, "ETag": self._tag}
        known = request.headers.get("if-none-match", "")
        if self._tag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self._body, media_type=self._type, headers=headers)
