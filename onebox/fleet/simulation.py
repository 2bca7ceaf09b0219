"""Discrete events: requests arrive, a policy chooses a member, members compute in steps as the engine does.

A step of a member computes one decode row for each running answer and prompt tokens of the requests with the fewest
left, as many as running answers may wait for. Prompts are computed from the end of what the member has cached of them.
Members that share a machine slow each other down: a step goes on at another pace from the moment that one of them has
something to do, or nothing any more.
Everything is drawn from seeds: equal settings give equal figures.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.fleet.step_times import StepTimes
from onebox.fleet.traffic import BLOCK_TOKENS, Turn, UserTraffic
from onebox.spec.errors import UsageError

__all__ = ["POLICIES", "RollingUpdate", "SimulatedRequest", "simulate_clients", "simulate_trace", "simulate_users"]

POLICIES = ("affinity", "session", "least_loaded", "round_robin", "random")
"""affinity: the most of the prompt cached, unless it has too much to do. session: always the same member."""
_SHARE = 0.1


class RollingUpdate(NamedTuple):
    """One member after the other, from `at_s` on: drained, `down_s` away, back with nothing cached."""

    at_s: float
    down_s: float


@dataclass(eq=False)
class SimulatedRequest:
    """A request and how it went; times in seconds of the simulation."""

    turn: Turn
    arrived_s: float
    member: int = -1
    cached_tokens: int = 0
    left_tokens: int = 0
    """Of the prompt, to be computed."""
    made: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    user: Iterator[tuple[float, Turn]] | None = None

    @property
    def wait_s(self) -> float:
        """To the first token."""
        return (self.first_s or 0.0) - self.arrived_s


class _PrefixCache:
    """Blocks by last use."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def num_hits(self, blocks: Sequence[Hashable]) -> int:
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))

    def store(self, blocks: Sequence[Hashable]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


@dataclass(eq=False)
class _Member:
    times: StepTimes
    number: int
    waiting: list[SimulatedRequest] = field(default_factory=list)
    prefilling: list[SimulatedRequest] = field(default_factory=list)
    decoding: list[SimulatedRequest] = field(default_factory=list)
    is_open: bool = True
    is_stepping: bool = False
    is_updating: bool = False
    ends_s: float = 0.0
    """When its step ends, as things are."""
    _left: float = 1.0
    """Of the step, at `_since_s`; the whole takes `_pace_s` as things are."""
    _since_s: float = 0.0
    _pace_s: float = 0.0
    _ratio: float = 1.0
    _parts: list[tuple[SimulatedRequest, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = _PrefixCache(self.times.cache_tokens // BLOCK_TOKENS)

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def cached_tokens(self, turn: Turn) -> int:
        """At least one token of a prompt is always computed."""
        return min(self.cache.num_hits(turn.blocks) * BLOCK_TOKENS, turn.prompt_tokens - 1)

    def begin_step(self, now: float, draw: random.Random) -> None:
        """What the next step computes is fixed now."""
        while self.waiting and len(self.prefilling) + len(self.decoding) < self.times.max_num_seqs:
            request = self.waiting.pop(0)
            request.cached_tokens = self.cached_tokens(request.turn)
            request.left_tokens = request.turn.prompt_tokens - request.cached_tokens
            self.prefilling.append(request)
        room = self.times.prompt_room(len(self.decoding))
        self._parts = []
        # Least remaining first.
        for request in sorted(self.prefilling, key=lambda request: request.left_tokens):
            part = min(room, request.left_tokens)
            if part:
                self._parts.append((request, part))
                room -= part
        ratios = self.times.prompt_ratios
        self._ratio = draw.choice(ratios) if ratios and self._parts else 1.0
        self._left, self._since_s, self._pace_s = 1.0, now, 0.0

    def set_pace(self, now: float, num_busy: int) -> float:
        """When the step ends, if so many members of the machine go on computing."""
        if self._pace_s:
            self._left -= (now - self._since_s) / self._pace_s
        self._since_s = now
        prompt_tokens = sum(part for _, part in self._parts)
        self._pace_s = self._ratio * self.times.step_s(len(self.decoding), prompt_tokens, num_busy)
        return now + max(0.0, self._left) * self._pace_s

    def end_step(self, now: float) -> list[SimulatedRequest]:
        """Takes the step's results in; returns the requests that ended."""
        for request in self.decoding:
            request.made += self.times.tokens_per_step
        for request, part in self._parts:
            request.left_tokens -= part
            if not request.left_tokens:
                request.first_s, request.made = now, 1.0
                self.prefilling.remove(request)
                self.decoding.append(request)
                self.cache.store(request.turn.blocks)
        ended = [request for request in self.decoding if request.made >= request.turn.answer_tokens]
        for request in ended:
            request.ended_s = now
            self.decoding.remove(request)
        return ended


class _Fleet:
    """The clock, the members and the policy."""

    def __init__(self, times: Sequence[StepTimes], policy: str, balance: int, seed: int) -> None:
        if policy not in POLICIES:
            raise UsageError(f"There is no policy {policy!r}; there are {', '.join(POLICIES)}.")
        self.members = [_Member(each, number) for number, each in enumerate(times)]
        self._machines = _machines(self.members)
        self.requests: list[SimulatedRequest] = []
        self.now = 0.0
        self.until_s = float("inf")
        self.update: RollingUpdate | None = None
        self.updated_s: float | None = None
        """When the last member was back."""
        self._policy, self._balance = policy, balance
        self._draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._turn = itertools.count()
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = itertools.count()
        self._held: list[SimulatedRequest] = []
        """Arrived while no member was open."""

    def at(self, moment: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), kind, what))

    def run(self) -> None:
        handlers = {"arrive": self._arrive, "step": self._take_step, "update": self._close, "back": self._open}
        while self._events:
            self.now, _, kind, what = heapq.heappop(self._events)
            handlers[kind](what)  # type: ignore[operator]

    def _arrive(self, request: SimulatedRequest) -> None:
        self.requests.append(request)
        self._route(request)

    def _route(self, request: SimulatedRequest) -> None:
        member = self._choose(request.turn)
        if member is None:
            self._held.append(request)
            return
        request.member = member.number
        member.waiting.append(request)
        if not member.is_stepping:
            member.is_stepping = True
            member.begin_step(self.now, self._draw)
            self._set_paces(member)

    def _set_paces(self, member: _Member) -> None:
        """One more or one less computes on this member's machine."""
        busy = [each for each in self._machines[member.number] if each.is_stepping]
        for each in busy:
            self._set_pace(each, len(busy))

    def _set_pace(self, member: _Member, num_busy: int) -> None:
        ends_s = member.set_pace(self.now, num_busy)
        member.ends_s = ends_s
        self.at(ends_s, "step", (member, ends_s))

    def _take_step(self, ending: tuple[_Member, float]) -> None:
        """A step ends, unless its pace was changed after this was foreseen."""
        member, ends_s = ending
        if member.is_stepping and member.ends_s == ends_s:
            self._end_step(member)

    def _end_step(self, member: _Member) -> None:
        for request in member.end_step(self.now):
            if request.user:
                self.next_turn(request.user, self.now + member.times.request_s)
        if member.load:
            member.begin_step(self.now, self._draw)
            self._set_pace(member, sum(each.is_stepping for each in self._machines[member.number]))
            return
        member.is_stepping = False
        self._set_paces(member)
        if member.is_updating and self.update:
            self.at(self.now + self.update.down_s, "back", member)

    def next_turn(self, user: Iterator[tuple[float, Turn]], now: float) -> None:
        pause_s, turn = next(user, (0.0, None))
        if turn and now + pause_s < self.until_s:
            self.at(now + pause_s, "arrive", SimulatedRequest(turn, now + pause_s, user=user))

    def _close(self, member: _Member) -> None:
        member.is_open, member.is_updating = False, True
        if not member.load and self.update:
            self.at(self.now + self.update.down_s, "back", member)

    def _open(self, member: _Member) -> None:
        member.is_open, member.is_updating = True, False
        member.cache.clear()
        held, self._held = self._held, []
        for request in held:
            self._route(request)
        if member.number + 1 < len(self.members):
            self._close(self.members[member.number + 1])
        else:
            self.updated_s = self.now

    # The policies.

    def _choose(self, turn: Turn) -> _Member | None:
        members = [member for member in self.members if member.is_open]
        if not members:
            return None
        match self._policy:
            case "round_robin":
                return members[next(self._turn) % len(members)]
            case "random":
                return self._draw.choice(members)
            case "session":
                return members[_place(turn.session, len(members))]
        least = min(member.load for member in members)
        lightest = [member for member in members if member.load == least]
        if self._policy == "affinity":
            cached = {member.number: member.cached_tokens(turn) for member in members}
            best = max(members, key=lambda member: (cached[member.number], -member.load))
            if cached[best.number] >= _SHARE * turn.prompt_tokens and best.load - least < self._balance:
                return best
        return self._draw.choice(lightest)


def _machines(members: Sequence[_Member]) -> list[list[_Member]]:
    """For each member all that share its machine: in the order of the members, as many as their times say."""
    shared: list[list[_Member]] = []
    while len(shared) < len(members):
        first = len(shared)
        group = list(members[first : first + members[first].times.num_sharing])
        shared += [group] * len(group)
    return shared


def _place(session: Hashable, count: int) -> int:
    """The same for equal sessions, in every process."""
    return random.Random(repr(session)).randrange(count)  # noqa: S311 - a hash that no process salts


def simulate_trace(
    times: Sequence[StepTimes],
    turns: Sequence[Turn],
    policy: str = "affinity",
    update: RollingUpdate | None = None,
    balance: int = 4,
) -> list[SimulatedRequest]:
    """Requests that arrive when the trace says; all are answered."""
    fleet = _Fleet(times, policy, balance, seed=0)
    for turn in turns:
        fleet.at(turn.at_s, "arrive", SimulatedRequest(turn, turn.at_s))
    return _run(fleet, update)


def simulate_users(
    times: Sequence[StepTimes],
    traffic: UserTraffic,
    seconds: float,
    policy: str = "affinity",
    update: RollingUpdate | None = None,
    balance: int = 4,
) -> list[SimulatedRequest]:
    """Users who send for so long; what they have sent then is answered."""
    fleet = _Fleet(times, policy, balance, traffic.seed)
    fleet.until_s = seconds
    for number in range(traffic.num_users):
        fleet.next_turn(traffic.user(number), 0.0)
    return _run(fleet, update)


def simulate_clients(
    times: Sequence[StepTimes],
    turns: Sequence[Turn],
    num_clients: int,
    policy: str = "affinity",
    balance: int = 4,
    seed: int = 0,
) -> list[SimulatedRequest]:
    """Clients who take the next request of one list when they have an answer; the requests' own times do not count."""
    fleet = _Fleet(times, policy, balance, seed)
    listed = ((0.0, turn) for turn in turns)
    for _ in range(num_clients):
        fleet.next_turn(listed, 0.0)
    return _run(fleet, None)


def _run(fleet: _Fleet, update: RollingUpdate | None) -> list[SimulatedRequest]:
    if update:
        fleet.update = update
        fleet.at(update.at_s, "update", fleet.members[0])
    fleet.run()
    return fleet.requests
