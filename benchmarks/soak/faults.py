"""What happens to operators: engines killed, stopped and starved, descriptors gone, the server told to stop.

Each fault opens a window that says what it excuses, and ends when the server is well again, or reports that it is not.
"""

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Awaitable, Callable

from benchmarks.soak.http import Connection
from benchmarks.soak.ledger import FaultWindow, Ledger
from benchmarks.soak.processes import read_use, virtual_bytes
from benchmarks.soak.server import ServerLife

__all__ = ["ENGINE_FAULTS", "Fault", "stop_server"]

Fault = Callable[[ServerLife, Ledger], Awaitable[None]]
RECOVERY_LIMIT_S = 90.0
_STOPPED_S = 4.0
_STARVED_S = 4.0
STOP_LIMIT_S = 15.0
"""--shutdown-timeout of a life, the last writes, and a busy machine."""


async def _recover(life: ServerLife, ledger: Ledger, window: FaultWindow) -> None:
    """Waits until /health says that requests are served again."""
    limit = time.monotonic() + RECOVERY_LIMIT_S
    while time.monotonic() < limit:
        if not life.is_alive:
            break
        if life.engine_pid is not None and await life.is_healthy():
            break
        await asyncio.sleep(0.2)
    else:
        ledger.fail("recovery", f"{window.name}: /health is not ok after {RECOVERY_LIMIT_S:.0f} s")
    window.ended = time.monotonic()
    ledger.note(f"fault: {window.name}, over after {window.ended - window.began:.1f} s")


async def kill_engine(life: ServerLife, ledger: Ledger) -> None:
    """SIGKILL: open requests fail with a reason, another process takes over."""
    window = ledger.open_window("engine killed", "errors", "stalls", "log")
    if life.signal_engine(signal.SIGKILL):
        life.num_deaths += 1
    await asyncio.sleep(1)
    await _recover(life, ledger, window)


async def stop_engine(life: ServerLife, ledger: Ledger) -> None:
    """SIGSTOP for some seconds: answers wait, and nothing fails."""
    window = ledger.open_window("engine stopped", "stalls")
    life.signal_engine(signal.SIGSTOP)
    try:
        await asyncio.sleep(_STOPPED_S)
    finally:
        life.signal_engine(signal.SIGCONT)
    await _recover(life, ledger, window)


async def starve_engine(life: ServerLife, ledger: Ledger) -> None:
    """No more address space for the engine for some seconds: requests or the engine may fail, the server may not."""
    window = ledger.open_window("engine starved of memory", "errors", "stalls", "log")
    pid, restarts = life.engine_pid, await _num_restarts(life)
    if pid is not None:
        with _limited(pid, resource.RLIMIT_AS, virtual_bytes(pid)):
            await asyncio.sleep(_STARVED_S)
    await asyncio.sleep(1)
    await _recover(life, ledger, window)
    life.num_deaths += int(await _num_restarts(life) - restarts)


async def exhaust_descriptors(life: ServerLife, ledger: Ledger) -> None:
    """The server may open three more descriptors, and connections take them all; then its engine dies as well."""
    window = ledger.open_window("descriptors exhausted, engine killed", "errors", "stalls", "log", "health")
    use, restarts = read_use(life.pid), await _num_restarts(life)
    if use is None:
        return
    async with contextlib.AsyncExitStack() as stack:
        with _limited(life.pid, resource.RLIMIT_NOFILE, use.num_descriptors + 3):
            for _ in range(12):
                with contextlib.suppress(OSError):
                    await stack.enter_async_context(Connection(life.address))
            await asyncio.sleep(1)
            life.signal_engine(signal.SIGKILL)
            await asyncio.sleep(3)
    await _recover(life, ledger, window)
    life.num_deaths += int(await _num_restarts(life) - restarts)


async def _num_restarts(life: ServerLife) -> float:
    with contextlib.suppress(OSError, ValueError):
        return (await life.metrics()).get("onebox:engine_restarts_total", 0.0)
    return 0.0


@contextlib.contextmanager
def _limited(pid: int, what: int, limit: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """A soft limit of another process, restored afterwards where it still lives."""
    with contextlib.suppress(ProcessLookupError):
        soft, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (limit, hard))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, what, (soft, hard))
        return
    yield


async def stop_server(life: ServerLife, ledger: Ledger, num_signals: int = 1) -> None:
    """SIGTERM in the middle of the load, once or twice: it ends in time, with status 0 and no traceback."""
    window = ledger.open_window(f"SIGTERM x{num_signals}", "errors", "stalls", "health", "log")
    began = time.monotonic()
    for index in range(num_signals):
        if index:
            await asyncio.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):
            life.process.send_signal(signal.SIGTERM)
    while life.is_alive and time.monotonic() - began < STOP_LIMIT_S:
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - began
    if life.is_alive:
        ledger.fail("stop", f"SIGTERM x{num_signals} has not ended the server after {STOP_LIMIT_S:.0f} s")
    elif life.process.returncode:
        ledger.fail("stop", f"the server ended with status {life.process.returncode} after SIGTERM x{num_signals}")
    else:
        ledger.note(f"fault: {window.name}, ended after {seconds:.1f} s")
    life.kill()
    window.ended = time.monotonic()


ENGINE_FAULTS: tuple[Fault, ...] = (stop_engine, kill_engine, starve_engine, exhaust_descriptors)
"""In this order in a short run. Few enough deaths in a row that the supervisor does not give up."""
