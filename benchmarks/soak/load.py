"""The load on one life of the server: ordinary clients, floods, hostile clients."""

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.soak.clients import References, judge, send_aborted, send_flood, send_new, send_reference
from benchmarks.soak.further import send_further
from benchmarks.soak.hostile import hostile_requests
from benchmarks.soak.http import call
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.libraries import send_by_library
from benchmarks.soak.server import ServerLife
from benchmarks.soak.sockets import Holders

__all__ = ["Load", "LoadSize"]

_PAUSE_LIMIT_S = 130.0
_FLOOD_INTERVAL_S = 15.0


@dataclass(frozen=True)
class LoadSize:
    """How many clients of each sort."""

    num_ordinary: int
    num_hostile: int
    has_floods: bool = True
    has_sockets: bool = True
    only: str = ""
    without: str = ""
    """Patterns of the kinds of hostile requests that are sent, or left out."""

    def sends(self, kind: str) -> bool:
        return bool(re.search(self.only, kind)) and not (self.without and re.search(self.without, kind))


class Load:
    """Started once per life; paused at quiet points and resumed after them."""

    def __init__(self, life: ServerLife, references: References, ledger: Ledger, seed: str, size: LoadSize) -> None:
        self._life = life
        self._address = life.address
        self._references = references
        self._ledger = ledger
        self._seed = seed
        self._size = size
        self._go = asyncio.Event()
        self._num_busy = 0
        self._hostile: deque[tuple[float, float, str]] = deque(maxlen=4000)
        """(began, ended, kind) of hostile requests; those under way have no end yet."""
        self._under_way: dict[int, tuple[float, str]] = {}
        self.holders = Holders(ledger)
        self._tasks = [
            asyncio.ensure_future(self._repeat(f"ordinary {i}", self._ordinary)) for i in range(size.num_ordinary)
        ]
        self._tasks += [asyncio.ensure_future(self._attack(index)) for index in range(size.num_hostile)]
        if size.has_floods:
            self._tasks.append(asyncio.ensure_future(self._repeat("flood", self._flood)))
        if size.has_sockets:
            self._tasks.append(asyncio.ensure_future(self._repeat("sockets", self._misuse)))

    def resume(self) -> None:
        self._go.set()

    async def pause(self) -> None:
        """No new requests; returns when those under way have ended."""
        self._go.clear()
        limit = time.monotonic() + _PAUSE_LIMIT_S
        while self._num_busy and time.monotonic() < limit:
            await asyncio.sleep(0.05)
        if self._num_busy:
            self._ledger.fail(
                "no answer", f"{self._num_busy} clients still wait {_PAUSE_LIMIT_S:.0f} s after the load ended"
            )

    def check_clients(self) -> None:
        """Raises what ended a client of ours: a mistake of the soak itself."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Leaves: every connection is closed, wherever its request is."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.holders.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _repeat(self, name: str, act: Callable[[random.Random], Awaitable[None]]) -> None:
        random_ = random.Random(f"{self._seed} {name}")
        while True:
            await self._go.wait()
            self._num_busy += 1
            try:
                await act(random_)
            finally:
                self._num_busy -= 1
            # A server that is gone refuses at once; nobody asks it a thousand times a second.
            await asyncio.sleep(0.02 if self._life.is_alive else 0.5)

    async def _ordinary(self, random_: random.Random) -> None:
        if self._ledger.is_excused("errors", time.monotonic(), time.monotonic()):
            # Told to come back later.
            await asyncio.sleep(0.3)
        choice = random_.random()
        if choice < 0.4:
            await send_reference(self._references, random_, self._address, self._ledger)
        elif choice < 0.68:
            await send_new(self._references, random_, self._address, self._ledger)
        elif choice < 0.85:
            await send_aborted(random_, self._address, self._ledger)
        elif choice < 0.96:
            await send_further(random_, self._address, self._ledger)
        else:
            await send_by_library(self._references, random_, self._address, self._ledger)

    async def _flood(self, random_: random.Random) -> None:
        until = time.monotonic() + _FLOOD_INTERVAL_S
        while time.monotonic() < until and self._go.is_set():
            await asyncio.sleep(0.5)
        if self._go.is_set():
            await send_flood(self._references, random_, self._address, self._ledger)

    async def _misuse(self, random_: random.Random) -> None:
        began = time.monotonic()
        name = await self.holders.run_one(random_, self._address)
        self._hostile.append((began, time.monotonic(), f"connection: {name}"))
        await asyncio.sleep(random_.random())

    async def _attack(self, index: int) -> None:
        requests = hostile_requests(random.Random(f"{self._seed} hostile {index}"), self._address)

        async def one(_: random.Random) -> None:
            request = next(request for request in requests if self._size.sends(request.kind))
            began = time.monotonic()
            self._under_way[index] = began, request.kind
            reply = await call(self._address, request.sent)
            del self._under_way[index]
            self._hostile.append((began, reply.ended, request.kind))
            seconds = reply.ended - reply.began
            self._ledger.slowest[request.kind] = max(seconds, self._ledger.slowest.get(request.kind, 0.0))
            judge(self._ledger, request.kind, request.sent, reply, request.allowed, request.check)
            if reply.status == 503:
                # An engine that restarts refuses everything: the next case waits for it.
                await asyncio.sleep(1)

        await self._repeat(f"hostile {index}", one)

    def company(self, began: float, ended: float) -> str:
        """What hostile clients did between these moments."""
        kinds = {kind for start, end, kind in self._hostile if start < ended and end > began}
        kinds |= {kind for start, kind in self._under_way.values() if start < ended}
        return ", ".join(sorted(kinds)) or "nobody"
