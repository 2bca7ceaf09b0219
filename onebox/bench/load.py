"""Concurrent requests: mixes of the tasks, and agents whose conversations grow.

Closed loop: a fixed number of clients, each sending its next request when the previous one completes. Open loop:
requests arrive at a given rate (a seeded Poisson process), independent of the server's progress. Either ends after a
number of requests or after a time; running requests are then completed. Prompts are prepared before timing starts.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

from onebox.bench.answer import Ask, StreamedAnswer
from onebox.bench.record import Role, WorkloadKind, WorkloadRecord
from onebox.bench.session import Prepared, Session
from onebox.bench.single import WARM_UP_PROMPT, warm_up
from onebox.bench.tally import WorkloadTally
from onebox.bench.tasks import TASKS, Task
from onebox.bench.texts import AGENT_TASK, QUESTIONS, agent_result
from onebox.spec.errors import UsageError

__all__ = ["MIXES", "Loop", "mix_lengths", "run_load"]

MIXES: dict[str, str] = {
    "uniform_short": "short prompts in turn: question, code, invoice to JSON, Hungarian",
    "mixed_typical": "three clients with short prompts for each client with 8K prompts",
    "long_only": "prompts of 108,000 tokens, or as long as the context allows",
    "agent": "conversations of six turns whose context grows by a tool's output each turn",
}
_LONG = Task("long", "Long", 108_000, 256, QUESTIONS["rag"], document="contracts")
_SHORT = tuple(TASKS[key] for key in ("docai-qa", "docai-code", "docai-kie", "docai-hungarian"))
_LANES: dict[str, tuple[tuple[Task, ...], ...]] = {
    "uniform_short": (_SHORT,),
    "mixed_typical": (_SHORT, _SHORT, _SHORT, (TASKS["rag-8k"],)),
    "long_only": ((_LONG,),),
}
"""The tasks of each client; with more clients than lanes, lanes are reused in order."""

_AGENT_TURNS = 6
_AGENT_WORDS = 200
_AGENT_TOKENS = 128
_AGENT_OPENING_TOKENS = 200
"""About what the agent's task and its template take."""
_TOKENS_PER_WORD = 1.4


def mix_lengths(mix: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(prompt tokens, answer tokens) of the requests of each client in turn, where the context is long enough.

    Of the agent mix: the turns of a conversation, each prompt holding the one before; about, since answers are text.
    """
    if mix != "agent":
        return tuple(tuple((task.prompt_tokens, task.max_tokens) for task in lane) for lane in _LANES[mix])
    growth = round(_AGENT_WORDS * _TOKENS_PER_WORD)
    first = _AGENT_OPENING_TOKENS + growth
    return (tuple((first + turn * (growth + _AGENT_TOKENS), _AGENT_TOKENS) for turn in range(_AGENT_TURNS)),)


@dataclass(frozen=True)
class Loop:
    """Arrival pattern of requests and when the load ends."""

    concurrency: int = 4
    """Clients of a closed loop; unused in an open loop."""
    rate: float | None = None
    """Arrivals per second of an open loop; None is a closed loop."""
    count: int | None = None
    """Requests, or conversations of the agent mix."""
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.duration_s is None):
            raise UsageError("Give either --count or --duration: it ends the load.")

    def title(self, mix: str) -> str:
        return f"{mix} c={self.concurrency}" if self.rate is None else f"{mix} {self.rate:g}/s"


class _Arrival(NamedTuple):
    """One turn of a client; times on the clock of time.perf_counter."""

    number: int
    lane: int
    """The client of a closed loop; the number of the arrival in an open loop."""
    end_at: float | None
    """No request starts after this."""
    planned_at: float | None = None
    """Open loop: when it should be sent."""

    def late_s(self, answer: StreamedAnswer) -> float | None:
        return None if self.planned_at is None else answer.sent_at - self.planned_at


class _Clients(Protocol):
    """The requests of a mix."""

    @property
    def is_empty(self) -> bool:
        """After `prepare`: no request fits the context."""
        ...

    async def prepare(self) -> Sequence[str]:
        """Prepares prompts before timing starts; returns notes."""
        ...

    async def warm_up(self) -> None:
        """Sends warm-up requests, for first-time work of the server."""
        ...

    async def send(self, arrival: "_Arrival") -> None:
        """Sends the requests of one arrival."""
        ...

    def end_notes(self) -> Sequence[str]:
        """Notes on what was not sent, after the load."""
        ...


async def run_load(session: Session, mix: str, loop: Loop) -> WorkloadRecord:
    """Measures one mix under one loop."""
    if mix not in MIXES:
        raise UsageError(f"There is no mix {mix!r}; there are {', '.join(MIXES)}.")
    title = loop.title(mix)
    each = _AGENT_TURNS if mix == "agent" else 1
    session.watch.begin(title, loop.count * each if loop.count else None)  # warm-up is added
    tally = session.open(
        WorkloadTally(title, WorkloadKind.LOAD, {"mix": mix, **asdict(loop), "seed": session.settings.seed})
    )
    clients: _Clients = _Agents(session, tally) if mix == "agent" else _Mix(session, tally, mix, loop)
    tally.notes += await clients.prepare()
    if clients.is_empty:
        session.tally = None
        return session.skipped(title, WorkloadKind.LOAD, "; ".join(tally.notes))
    await clients.warm_up()
    before = await session.drafts()
    await (_closed if loop.rate is None else _open)(clients, loop, session.settings.seed)
    tally.count_drafts(before, await session.drafts())
    tally.notes += clients.end_notes()
    return await session.close(tally)


async def _closed(clients: _Clients, loop: Loop, seed: int) -> None:  # noqa: ARG001 - both loops have one signature
    end_at = None if loop.duration_s is None else time.perf_counter() + loop.duration_s
    numbers = iter(range(loop.count)) if loop.count is not None else None
    sent = 0

    async def work(lane: int) -> None:
        nonlocal sent
        while end_at is None or time.perf_counter() < end_at:
            number = sent if numbers is None else next(numbers, None)
            if number is None:
                return
            sent += 1
            await clients.send(_Arrival(number, lane, end_at))

    async with asyncio.TaskGroup() as group:
        for lane in range(loop.concurrency):
            group.create_task(work(lane))


async def _open(clients: _Clients, loop: Loop, seed: int) -> None:
    draw, began_at = random.Random(seed), time.perf_counter()  # noqa: S311 - repeatable, not secret
    end_at = None if loop.duration_s is None else began_at + loop.duration_s
    arrives_at, number = began_at, 0
    async with asyncio.TaskGroup() as group:
        while loop.count is None or number < loop.count:
            arrives_at += draw.expovariate(loop.rate or 1.0)
            if end_at is not None and arrives_at >= end_at:
                return
            # Arrival times are fixed in advance: a late request does not delay later arrivals.
            await asyncio.sleep(max(arrives_at - time.perf_counter(), 0))
            group.create_task(clients.send(_Arrival(number, number, end_at, arrives_at)))
            number += 1


class _Mix:
    """Independent requests."""

    def __init__(self, session: Session, tally: WorkloadTally, mix: str, loop: Loop) -> None:
        self._session = session
        self._tally = tally
        self._mix = mix
        self._lanes: Sequence[tuple[Task, ...]] = _LANES[mix]
        self._num_clients = loop.concurrency if loop.rate is None else None
        self._prepared: dict[str, Prepared] = {}
        self._num_sent: dict[tuple[str, ...], int] = {}
        self._sent: set[str] = set()

    async def prepare(self) -> Sequence[str]:
        tasks = {task.key: task for lane in self._lanes for task in lane}.values()
        every = [await self._session.prepare(task) for task in tasks]
        self._prepared = {made.task.key: made for made in every if not made.too_long}
        kept = [tuple(task for task in lane if task.key in self._prepared) for lane in self._lanes]
        self._lanes = [lane for lane in kept if lane]
        self._tally.settings["prompts"] = {key: made.settings for key, made in self._prepared.items()}
        left_out = [f"{made.task.title}: left out, {made.too_long}" for made in every if made.too_long]
        return left_out + [f"{made.task.title}: {note}" for made in self._prepared.values() for note in made.notes]

    @property
    def is_empty(self) -> bool:
        return not self._lanes

    async def warm_up(self) -> None:
        """Warms up each task not measured before, unless its prompt is long."""
        for key, made in self._prepared.items():
            if key not in self._session.warmed and made.wanted.prompt_tokens <= WARM_UP_PROMPT:
                for _ in range(self._session.settings.warm_ups):
                    await warm_up(self._session, self._tally, made)

    async def send(self, arrival: _Arrival) -> None:
        tasks = self._lanes[arrival.lane % len(self._lanes)]
        # Lanes with the same tasks share one turn, so that each task is sent equally often whoever sends it.
        keys = tuple(task.key for task in tasks)
        turn = self._num_sent[keys] = self._num_sent.get(keys, -1) + 1
        prepared = self._prepared[keys[turn % len(keys)]]
        self._sent.add(prepared.task.key)
        ask = replace(prepared.ask(self._session.nonce()), ignore_eos=self._session.settings.ignore_eos)
        answer = await self._session.send(ask)
        self._tally.add(answer, Role.LOAD, run=arrival.number, late_s=arrival.late_s(answer))

    def end_notes(self) -> Sequence[str]:
        missing = [made.task for key, made in self._prepared.items() if key not in self._sent]
        few = self._num_clients is not None and self._num_clients < len(self._lanes)
        why = f"{self._mix} needs {len(self._lanes)} clients for it" if few else "the load ended before its turn"
        return [f"{task.title} ({task.prompt_tokens:,} tokens) was never sent: {why}" for task in missing]


class _Agents:
    """Conversations: each turn sends all earlier messages, answers included."""

    def __init__(self, session: Session, tally: WorkloadTally) -> None:
        self._session = session
        self._tally = tally
        self._turns = _AGENT_TURNS

    async def prepare(self) -> Sequence[str]:
        """Finds the number of turns that fit the context."""
        limit = self._session.max_model_len
        self._tally.settings["prompts"] = {"turns": _AGENT_TURNS, "max_tokens": _AGENT_TOKENS, "words": _AGENT_WORDS}
        counts = []
        for turn in range(2):
            messages = self._opening("0" * 12)
            for earlier in range(turn):
                messages += [{"role": "assistant", "content": "I see."}, self._result(earlier + 1)]
            counts.append(await self._session.client.count_prompt(self._ask(messages)))
        first, second = counts
        if limit is None or first is None or second is None:
            return []
        growth = second - first + _AGENT_TOKENS
        self._turns = max(min(_AGENT_TURNS, 1 + (limit - first - _AGENT_TOKENS) // growth), 0)
        if self._turns < _AGENT_TURNS:
            return [f"scaled down to {self._turns} turns from {_AGENT_TURNS}: the context holds {limit:,} tokens"]
        return []

    @property
    def is_empty(self) -> bool:
        return self._turns == 0

    async def warm_up(self) -> None:
        """One warm-up turn, unless another workload was measured before."""
        if not self._session.warmed and self._session.settings.warm_ups:
            answer = await self._session.send(self._ask(self._opening(self._session.nonce())))
            self._tally.add(answer, Role.WARM_UP)

    def end_notes(self) -> Sequence[str]:
        return ()

    async def send(self, arrival: _Arrival) -> None:
        messages = self._opening(self._session.nonce())
        for turn in range(self._turns):
            if arrival.end_at is not None and time.perf_counter() >= arrival.end_at:
                return
            answer = await self._session.send(self._ask(messages))
            # Later turns follow an answer, not a plan.
            late_s = None if turn else arrival.late_s(answer)
            self._tally.add(answer, Role.LOAD, turn=turn + 1, run=arrival.number, late_s=late_s)
            if answer.failure:
                return
            said = answer.content or "(A call without words.)"
            messages += [{"role": "assistant", "content": said}, self._result(turn + 1)]

    def _opening(self, nonce: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"Session {nonce}. {AGENT_TASK}"}, self._result(0)]

    def _result(self, turn: int) -> dict[str, Any]:
        return {"role": "user", "content": agent_result(turn, _AGENT_WORDS)}

    def _ask(self, messages: list[dict[str, Any]]) -> Ask:
        ignore_eos = self._session.settings.ignore_eos
        return Ask(tuple(messages), max_tokens=_AGENT_TOKENS, ignore_eos=ignore_eos, thinking=False, label="agent")
