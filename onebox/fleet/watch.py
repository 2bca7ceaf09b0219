"""One member as the fleet sees it: looked at every second, its relay opened and closed by what is found."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from onebox.fleet.config import FleetConfig, MemberConfig
from onebox.fleet.member import (
    Identity,
    MemberCounters,
    differences,
    read_counters,
    read_identity,
    refuse_open,
)
from onebox.fleet.process import OwnedProcess
from onebox.fleet.relay import Relay
from onebox.spec.errors import OneboxError

__all__ = ["FleetMember", "MemberState"]

_SPEED_S = 10.0
"""Speeds are over so long."""
_RESTART_S = (1.0, 30.0)
"""Before a member of the fleet's own is started again: at first, and at most; doubled each time."""


class MemberState(StrEnum):
    """Why a member takes requests or does not."""

    UP = "up"
    DRAINED = "drained"
    DOWN = "down"
    HUNG = "hung"
    UNAVAILABLE = "unavailable"
    """It answers, and says that it takes no requests."""
    DIFFERENT = "different"
    """Another model, version or context than the fleet's."""


@dataclass(eq=False)
class FleetMember:
    """A member, its relay, and its process where it is the fleet's own."""

    config: MemberConfig
    fleet: FleetConfig
    http: httpx.AsyncClient
    relay: Relay
    wanted: set[Identity]
    """What it may be; two while the fleet is rolled. Shared by all members."""
    run: Callable[[MemberConfig, int], OwnedProcess]
    """Starts a server of the fleet's own on a port."""
    process: OwnedProcess | None = None
    identity: Identity | None = None
    state: MemberState = MemberState.DOWN
    message: str = "It was not asked yet."
    counters: MemberCounters = field(default_factory=MemberCounters)
    is_drained: bool = False
    is_replaced: bool = False
    """While it is, an end of its process is not a failure."""
    num_restarts: int = 0
    _history: deque[tuple[float, MemberCounters]] = field(default_factory=deque)

    @property
    def url(self) -> str:
        return self.relay.url

    async def watch(self) -> None:
        """Looks for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self.fleet.poll_s)

    async def look(self) -> None:
        """One look: asks the member, opens or closes its relay, and starts a process of the fleet's own that ended."""
        url = self.url
        state, message = await self._ask()
        if url != self.url:
            return  # replaced meanwhile: what was found is about the one before
        self._enter(state, message)
        if state is MemberState.UP:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._note(await read_counters(self.http, url))
        if self.process and self.process.status is not None and not self.is_replaced:
            await self._restart(self.process)

    def drain(self) -> None:
        """No new requests; those that it has go on."""
        self.is_drained = True
        self._enter(self.state, self.message)

    def resume(self) -> None:
        self.is_drained = False
        self._enter(self.state, self.message)

    def move(self, url: str, process: OwnedProcess | None, identity: Identity) -> None:
        """New requests go to another server from now on."""
        self.relay.url, self.process, self.identity = url, process, identity
        self._history.clear()
        self._enter(MemberState.UP, "")

    async def _ask(self) -> tuple[MemberState, str]:
        if self.process and self.process.status is not None:
            self.identity = None
            return MemberState.DOWN, self.process.why()
        try:
            async with asyncio.timeout(self.fleet.hang_s):
                response = await self.http.get(f"{self.url}/health", timeout=None)
        except TimeoutError:
            return MemberState.HUNG, f"/health was not answered for {self.fleet.hang_s:g} s."
        except httpx.HTTPError as error:
            self.identity = None  # who comes back may be another
            return MemberState.DOWN, f"No connection ({str(error) or type(error).__name__})."
        if response.status_code != 200:
            self.identity = None
            return MemberState.UNAVAILABLE, _said(response)
        return await self._identify()

    async def _identify(self) -> tuple[MemberState, str]:
        """A member that was away is asked again who it is."""
        if self.identity is None or self.identity not in self.wanted:
            try:
                self.identity = await read_identity(self.http, self.url)
                if self.fleet.needs_keys:
                    await refuse_open(self.http, self.config.name, self.url)
            except OneboxError as error:
                self.identity = None
                return MemberState.UNAVAILABLE, str(error)
        if self.identity in self.wanted:
            return MemberState.UP, ""
        wrong = min((differences(self.identity, each) for each in self.wanted), key=len, default=[])
        return MemberState.DIFFERENT, f"It is not like the fleet: {'; '.join(wrong)}."

    def _enter(self, state: MemberState, message: str) -> None:
        self.state, self.message = state, message
        if state is MemberState.UP:
            self.relay.closed_reason = "it is drained." if self.is_drained else ""
            return
        self.relay.closed_reason = f"it is {state}. {message}"
        if state in (MemberState.HUNG, MemberState.DOWN):
            self.relay.cut(f"{self.config.name} is {state}: {message}")

    async def _restart(self, ended: OwnedProcess) -> None:
        first, most = _RESTART_S
        await asyncio.sleep(min(first * 2**self.num_restarts, most))
        if self.process is ended and not self.is_replaced:
            ended.kill()  # what it has left behind
            self.num_restarts += 1
            try:
                self.process = self.run(self.config, int(self.url.rpartition(":")[2]))
            except OneboxError as error:
                self._enter(MemberState.DOWN, str(error))

    # What is shown.

    def _note(self, counters: MemberCounters) -> None:
        now = time.monotonic()
        if counters.generated_tokens < self.counters.generated_tokens:
            self._history.clear()  # started again
        self.counters = counters
        self._history.append((now, counters))
        while self._history[0][0] < now - _SPEED_S and len(self._history) > 2:
            self._history.popleft()

    def _per_s(self, name: str) -> float:
        if self.state is not MemberState.UP or len(self._history) < 2:
            return 0.0
        (began, first), (ended, last) = self._history[0], self._history[-1]
        return float((getattr(last, name) - getattr(first, name)) / max(ended - began, 1e-9))

    def status(self) -> dict[str, Any]:
        """One row of the table."""
        counters = self.counters
        state = MemberState.DRAINED if self.is_drained and self.state is MemberState.UP else self.state
        return {
            "name": self.config.name,
            "url": self.url,
            "state": state.value,
            "message": self.message,
            "is_owned": self.config.is_owned,
            "version": self.identity.version if self.identity else None,
            "num_open": self.relay.num_open(),
            "num_running": counters.num_running,
            "num_waiting": counters.num_waiting,
            "kv_share": round(counters.kv_share, 4),
            "hit_share": round(counters.hit_tokens / counters.queried_tokens, 4) if counters.queried_tokens else None,
            "generated_per_s": round(self._per_s("generated_tokens"), 1),
            "prompt_per_s": round(self._per_s("computed_tokens"), 1),
            "num_answered": int(counters.num_answered),
            "num_passed": self.relay.num_passed,
            "num_refused": self.relay.num_refused,
            "num_cut": self.relay.num_cut,
            "num_restarts": self.num_restarts,
        }


def _said(response: httpx.Response) -> str:
    try:
        body = response.json()
        return str(body.get("message") or body["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"/health answers {response.status_code}."
