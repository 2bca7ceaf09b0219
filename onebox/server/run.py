"""Runs the application on a socket until told to stop: by SIGINT, by SIGTERM, or by the second of either at once."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from onebox.spec.errors import OneboxError

__all__ = ["bind", "run"]


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, taken before anything slow is done; one that is in use is refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise OneboxError(f"Port {port} on {host} cannot be had ({reason}); choose another with --port.") from None
    return bound


def run(app: FastAPI, bound: socket.socket, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
    """Serves until a signal. `on_stop` then ends what is in flight: clients hear of it and the wait is short."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    asyncio.run(_serve(_Server(config, on_ready), bound, on_stop))


async def _serve(server: "_Server", bound: socket.socket, on_stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        loop.run_in_executor(None, on_stop)

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    await server.serve(sockets=[bound])


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals alone: uvicorn would raise them again after a clean stop."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
