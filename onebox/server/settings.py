"""The operator's settings of the HTTP side. The engine and the model have their own."""

from dataclasses import dataclass

__all__ = ["ServerSettings"]


@dataclass(frozen=True)
class ServerSettings:
    """Frozen for the server's life."""

    api_key: str | None = None
    """Required except for /health, /version and the pages, as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser; "*" allows all, none is the default."""
    max_body_bytes: int = 64 << 20
    """A longer body is refused with 413 before it is parsed. Large, since bodies contain images."""
    heartbeat_s: float = 15.0
    """A stream that was silent for so long sends a heartbeat; idle limits of clients and proxies begin at a minute."""
    send_timeout_s: float = 60.0
    """A client that reads nothing of its stream for so long is cut off and its request ended.

    A slow client never blocks the engine: its tokens wait in memory, at most those of its own answer. The limit keeps
    clients that stopped reading from accumulating."""
