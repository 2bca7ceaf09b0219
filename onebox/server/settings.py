"""The operator's settings of the HTTP side. The engine and the model have their own."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from onebox.server.keys import ApiKey
from onebox.server.response_store import StoreLimits
from onebox.spec.errors import UnreadableError

__all__ = ["ConnectionLimits", "ServerSettings", "TlsFiles"]


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, whatever their headers say. Beyond one, the connection is closed."""

    max_connections: int = 1000
    """At once; at most half of the process's file descriptors. Beyond it, the connection that has waited longest for a
    complete request is closed; if all are being answered, new ones get 503, except /health from this machine."""
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    """Of a request's target and header fields; more get 431."""
    header_timeout_s: float = 10.0
    """For a complete header, from the connection or from its first byte."""
    keep_alive_s: float = 30.0
    """An idle connection is closed after so long."""
    body_grace_s: float = 10.0
    """A body may take so long, and longer at `min_body_bytes_per_s`; a slower one gets 408."""
    min_body_bytes_per_s: int = 32 << 10
    send_timeout_s: float = 60.0
    """A client may take nothing of its answer for so long, and longer at `min_send_bytes_per_s`; then it is cut off
    and its request ended. It never blocks the engine: its tokens wait in memory, at most those of its own answer."""
    min_send_bytes_per_s: int = 4 << 10


@dataclass(frozen=True)
class TlsFiles:
    """What the server needs to speak HTTPS, in PEM."""

    certificate: Path
    key: Path | None = None
    """None: it is in the certificate's file."""
    client_authorities: Path | None = None
    """Clients must show a certificate of one of these."""

    def context(self) -> ssl.SSLContext:
        """Refuses files that cannot be read or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_authorities:
                context.load_verify_locations(self.client_authorities)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            shown = ", ".join(str(path) for path in (self.certificate, self.key, self.client_authorities) if path)
            raise UnreadableError(f"TLS cannot be set up with {shown}: {error.strerror or error}.") from None
        return context


@dataclass(frozen=True)
class ServerSettings:
    """Frozen for the server's life."""

    api_keys: tuple[ApiKey, ...] = ()
    """One is required, except for /health, /version and the pages, as `Authorization: Bearer KEY` or `x-api-key: KEY`.
    None: everybody may call."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header beside addresses and the machine's own; "*.name" for all below one, "*" for all.

    Checked where there is no API key, and with one only if given."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser; "*" allows all, none is the default."""
    max_body_bytes: int = 64 << 20
    """A longer body is refused with 413 before it is parsed. Large, since bodies contain images."""
    max_bodies_bytes: int = 256 << 20
    """Of all requests being answered together, small bodies not counted; beyond it a request gets 429."""
    heartbeat_s: float = 15.0
    """A stream that was silent for so long sends a heartbeat; idle limits of clients and proxies begin at a minute."""
    responses: StoreLimits = field(default_factory=StoreLimits)
    """Of answers of the Responses API that are kept."""
    responses_dir: Path | None = None
    """Where they are kept; None: in memory."""
    root_path: str = ""
    """A prefix of every path, as a reverse proxy passes it on; requests without it are served too."""
    metrics_port: int | None = None
    """A further port of the server where GET /metrics, and nothing else, is answered without a key."""
    logs_requests: bool = True
    """One line each, at the level info; nothing of what was asked or answered."""
    max_logged_characters: int = 0
    """Of each prompt and each answer that are in its line."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
