"""The timeline: a long steady life whose memory must stay flat, then lives full of faults."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.checks import CanarySample, LogScan, MemoryChange, QuietState, check_quiet, compare_quarters
from benchmarks.soak.clients import References
from benchmarks.soak.faults import ENGINE_FAULTS, Fault, stop_server
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.load import Load, LoadSize
from benchmarks.soak.probes import Probes
from benchmarks.soak.processes import tree_use
from benchmarks.soak.server import LifeOptions, ServerLife

__all__ = ["Soak", "SoakOptions"]

STEADY_SHARE = 0.6
"""Of the time, for the life whose memory is compared."""
WARM_UP_SHARE = 0.2
"""Of the steady life: caches, pools and the allocator reach their sizes; its quiet points do not count."""
MAX_STALL_S = 3.0
_IDLE_LIMIT_S = 60.0
"""An answer that is never read is computed to its end all the same."""
_TRIM_S = 11.0
_KEY = "soak-key"


@dataclass(frozen=True)
class SoakOptions:
    seconds: float
    seed: int
    size: LoadSize
    directory: Path
    has_faults: bool = True


@dataclass
class LifeRecord:
    """What was measured in one life."""

    name: str
    start_s: float
    points: list[tuple[float, QuietState]] = field(default_factory=list)
    """(seconds since the life was ready, state)."""
    changes: list[MemoryChange] = field(default_factory=list)
    num_deaths: int = 0


class Soak:
    """One run."""

    def __init__(self, options: SoakOptions, references: References | None = None) -> None:
        self._options = options
        self.ledger = Ledger(options.directory)
        self.probes = Probes()
        self.num_canaries = 0
        self._scan = LogScan()
        self.references = references or References()
        self.lives: list[LifeRecord] = []
        self.faults: list[str] = []
        self._random = random.Random(f"{options.seed} timeline")
        self._deadline = self.ledger.began + options.seconds

    async def run(self) -> None:
        """Until the time is over; what is under way then is brought to its end."""
        share = STEADY_SHARE if self._options.has_faults else 1.0
        steady_until = self.ledger.began + share * self._options.seconds
        while not self.lives or steady_until - time.monotonic() > 10:
            # More than one where the server dies.
            await self._live(LifeOptions("steady", stores_in_files=True), (), steady_until - time.monotonic())
            if not self.lives:
                # It does not even start.
                break
        if self._options.has_faults and self._remaining_s > 60:
            await self._live(LifeOptions("idle", is_released=True), (), 0)
        number = 0
        while self._options.has_faults and self._remaining_s > 15:
            name = f"faults {number}"
            key = _KEY if number % 2 == 0 else None
            options = LifeOptions(name, key, closes_stdout=number % 2 == 0, has_full_disk=number % 2 == 1)
            faults = list(ENGINE_FAULTS)
            if number:
                self._random.shuffle(faults)
            await self._live(options, faults, self._remaining_s)
            number += 1
        self.probes.close()

    @property
    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    async def _live(self, options: LifeOptions, faults: Sequence[Fault], seconds: float) -> None:
        """One server from its start to its end; a life without faults lasts for the given time."""
        until = time.monotonic() + seconds
        self.ledger.note(f"life: {options}")
        window = self.ledger.open_window("start", "health")
        try:
            life = await asyncio.to_thread(ServerLife, options, self._options.directory, self._take_line)
        except RuntimeError as error:
            self.ledger.fail("start", str(error))
            return
        finally:
            window.ended = time.monotonic()
        record = LifeRecord(options.name, life.start_s)
        self.lives.append(record)
        self.ledger.note(f"ready after {life.start_s:.1f} s at {life.address.host}:{life.address.port}, pid {life.pid}")
        load = None
        is_stopping = False
        try:
            self.probes.watch(life)
            self.ledger.is_server_gone = lambda: not is_stopping and not life.is_alive
            await self.references.compute(life.address, self.ledger)
            base = await life.quiet_state()
            load = Load(life, self.references, self.ledger, f"{self._options.seed} {options.name}", self._options.size)
            if options.is_released:
                await self._doze(life, load)
            elif faults:
                await self._suffer(life, load, record, base, faults, until)
            else:
                await self._steady(life, load, record, base, until)
            await self._load_for(life, load, min(4.0, self._options.seconds / 20))
            self.probes.rest()
            if life.is_alive:
                is_stopping = True
                await stop_server(life, self.ledger, num_signals=2 - len(self.lives) % 2)
            else:
                self._report_death(life, load)
        finally:
            self.probes.rest()
            record.num_deaths = life.num_deaths
            if load:
                await load.stop()
                self._take_canaries(load)
            life.kill()

    def _report_death(self, life: ServerLife, load: Load) -> None:
        """One failure, with what hostile clients were doing."""
        began = life.last_seen
        window = self.ledger.open_window("the server has died", "errors", "stalls", "health")
        window.began = began
        window.ended = time.monotonic()
        company = load.company(began - 2.0, window.ended)
        self.ledger.fail("died", f"the server ended with status {life.process.returncode} beside {company}")

    async def _steady(self, life: ServerLife, load: Load, record: LifeRecord, base: QuietState, until: float) -> None:
        """Load and quiet points in turns, at least ten of them, a minute apart at most."""
        began = time.monotonic()
        interval = max(1.0, min(60.0, (until - began) / 10))
        while life.is_alive:
            await self._load_for(life, load, interval)
            await self._quiet(life, load, record, base, began)
            if time.monotonic() + interval / 2 > until:
                break
        points = [state for at, state in record.points if at >= WARM_UP_SHARE * (until - began)]
        for name in ("server", "engine"):
            change = compare_quarters(name, [float(state.rss_bytes.get(name, 0)) for state in points], until - began)
            if change:
                record.changes.append(change)
                if not change.is_flat:
                    text = f"{name}: {change.first_bytes / 1e6:.1f} MB to {change.last_bytes / 1e6:.1f} MB"
                    self.ledger.fail("memory", f"{text} ({change.share:+.1%}) over {change.num_samples} quiet points")

    async def _suffer(
        self,
        life: ServerLife,
        load: Load,
        record: LifeRecord,
        base: QuietState,
        faults: Sequence[Fault],
        until: float,
    ) -> None:
        """One fault after the other under load, each followed by a quiet point."""
        began = time.monotonic()
        for fault in faults:
            if time.monotonic() > until or not life.is_alive:
                return
            await self._load_for(life, load, 3.0)
            self.faults.append(fault.__name__)
            await fault(life, self.ledger)
            await self._load_for(life, load, 3.0)
            await self._quiet(life, load, record, base, began)

    async def _doze(self, life: ServerLife, load: Load) -> None:
        """Twice: load, a pause until the engine is released, and the same answers from the one that wakes."""
        for _ in range(2):
            await self._load_for(life, load, 5.0)
            self.probes.send_canaries(False)
            await load.pause()
            await load.holders.end_unread()
            limit = time.monotonic() + _IDLE_LIMIT_S
            while not await life.is_idle():
                if time.monotonic() > limit:
                    self.ledger.fail("idle", f"the engine is not released {_IDLE_LIMIT_S:.0f} s after the load")
                    return
                await asyncio.sleep(0.5)
            self.ledger.note("idle: the engine is released")
            await self.references.compute(life.address, self.ledger)

    async def _load_for(self, life: ServerLife, load: Load, seconds: float) -> None:
        until = time.monotonic() + seconds
        load.resume()
        self.probes.send_canaries(True)
        while life.is_alive and time.monotonic() < until:
            load.check_clients()
            await asyncio.sleep(0.1)

    async def _quiet(self, life: ServerLife, load: Load, record: LifeRecord, base: QuietState, began: float) -> None:
        """Stops the load, waits for an idle server, and compares it with what it was before the load."""
        self.probes.send_canaries(False)
        await load.pause()
        await load.holders.end_unread()
        self._take_canaries(load)
        limit = time.monotonic() + _IDLE_LIMIT_S
        while life.is_alive:
            state = await life.quiet_state()
            problems = check_quiet(_without_held(state, load.holders.num_held), base, life.num_deaths)
            if not problems or time.monotonic() > limit:
                break
            await asyncio.sleep(0.5)
        # The server gives freed memory back every ten seconds; short runs wait for less.
        await asyncio.sleep(min(_TRIM_S, self._options.seconds / 20))
        if life.is_alive:
            state = state._replace(rss_bytes={name: use.rss_bytes for name, use in tree_use(life.pid).items()})
            for problem in problems:
                self.ledger.fail("leak", problem)
            await self.references.replay(life.address, self.ledger)
            record.points.append((time.monotonic() - began, state))
            sizes = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in state.rss_bytes.items())
            self.ledger.note(f"quiet: {sizes}; descriptors {state.num_descriptors}, threads {state.num_threads}")

    def _take_canaries(self, load: Load) -> None:
        """Judges those sent since the last time."""
        new = self.probes.canaries[self.num_canaries :]
        self.num_canaries += len(new)
        for canary in new:
            self._judge_canary(canary, load.company(canary.began, canary.ended))

    def _judge_canary(self, canary: CanarySample, company: str) -> None:
        """Time without a core is the machine's fault, not a client's."""
        ledger = self.ledger
        # A flood may have filled the queue.
        if canary.status not in (200, 429) and not ledger.is_excused("errors", canary.began, canary.ended):
            ledger.fail("canary", f"status {canary.status} beside {company}")
        ledger.count("canary", str(canary.status))
        if ledger.is_excused("stalls", canary.began, canary.ended):
            return
        ledger.stalls = sorted([*ledger.stalls, (canary.net_s, canary.ended - ledger.began, company)], reverse=True)[
            :20
        ]
        if canary.net_s > MAX_STALL_S:
            text = f"a canary waited {canary.wait_s:.1f} s ({canary.delay_s:.1f} s of it for a core)"
            ledger.fail("stall", f"{text} beside {company}")

    def _take_line(self, line: str) -> None:
        now = time.monotonic()
        may_die = self.ledger.is_excused("log", now, now)
        if problem := self._scan.take(line, engine_may_die=may_die):
            self.ledger.fail("log", problem[:300])


def _without_held(state: QuietState, num_held: int) -> QuietState:
    """Connections that the soak still holds are no leak."""
    descriptors = state.num_descriptors
    return state._replace(num_descriptors={**descriptors, "server": descriptors.get("server", 0) - num_held})
