"""Ordinary clients, and the judgement of every reply: an answer, or an error that names its cause."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.soak.answers import ANSWER_PATHS, Answer, StreamFailedError, read_answer
from benchmarks.soak.checks import check_error
from benchmarks.soak.http import Address, Reply, Sent, call
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.scenarios import Scenario, draw, reference_scenarios

__all__ = ["References", "judge", "send_aborted", "send_flood", "send_new", "send_reference"]

_OK, _QUEUE_FULL = 200, 429
_MAX_PENDING = 6


@dataclass
class References:
    """Answers computed alone: those of a fixed set, and those of new requests, computed again when the server idles."""

    answers: dict[int, Answer] = field(default_factory=dict)
    """By the number of the scenario."""
    scenarios: list[Scenario] = field(default_factory=reference_scenarios)
    pending: list[tuple[Scenario, Answer]] = field(default_factory=list)
    """New requests with the answer they got in company."""

    async def compute(self, address: Address, ledger: Ledger) -> None:
        """The fixed set, one after the other, whole; streamed too where the server is the first one."""
        ways = (False,) if self.answers else (False, True)
        for number, scenario in enumerate(self.scenarios):
            for is_streamed in ways:
                answer = await _ask(scenario, address, ledger, is_streamed=is_streamed)
                if answer is not None:
                    self.compare(number, answer, ledger)

    def compare(self, number: int, answer: Answer, ledger: Ledger) -> None:
        """With the first answer to the same request."""
        _compare(self.answers.setdefault(number, answer), answer, self.scenarios[number], ledger)

    async def replay(self, address: Address, ledger: Ledger) -> None:
        """New requests once more, alone."""
        pending, self.pending = self.pending, []
        for scenario, given in pending:
            answer = await _ask(scenario, address, ledger, is_streamed=False)
            if answer is not None:
                _compare(answer, given, scenario, ledger)

    def keep(self, scenario: Scenario, answer: Answer) -> None:
        if len(self.pending) < _MAX_PENDING:
            self.pending.append((scenario, answer))


def _compare(alone: Answer, given: Answer, scenario: Scenario, ledger: Ledger) -> None:
    ledger.num_compared += 1
    if alone != given:
        text = f"{scenario.kind}: alone {str(alone)[:400]}, in company {str(given)[:400]}"
        ledger.fail("wrong answer", text, body=scenario.encoded(is_streamed=False))


async def _ask(scenario: Scenario, address: Address, ledger: Ledger, *, is_streamed: bool) -> Answer | None:
    sent = Sent(scenario.path, scenario.encoded(is_streamed=is_streamed))
    reply = await call(address, sent)
    return judge(ledger, scenario.kind, sent, reply)


def judge(
    ledger: Ledger,
    kind: str,
    sent: Sent,
    reply: Reply,
    allowed: frozenset[int] = frozenset({_OK}),
    check: Callable[[Reply], str | None] | None = None,
) -> Answer | None:
    """Counts a reply and reports what is wrong with it; the answer, where it is one.

    429 is always allowed; an error of the server only while a fault is planted that explains it.
    """
    if reply.was_aborted:
        ledger.count(kind, "left")
        return None
    is_excused = ledger.is_excused("errors", reply.began, reply.ended)
    if reply.status is None and ledger.is_server_gone():
        ledger.count(kind, "server gone")
        return None
    if reply.status is None:
        _count_or_fail(ledger, kind, "no answer", f"{kind}: {reply.problem}", sent, is_excused=is_excused)
        return None
    if reply.status != _OK:
        _judge_refusal(ledger, kind, sent, reply, allowed, is_excused=is_excused)
        return None
    if _OK not in allowed:
        ledger.fail("accepted", f"{kind}: status 200, expected {sorted(allowed)}", body=sent.body)
        return None
    return _judge_answer(ledger, kind, sent, reply, check, is_excused=is_excused)


def _judge_refusal(
    ledger: Ledger, kind: str, sent: Sent, reply: Reply, allowed: frozenset[int], *, is_excused: bool
) -> None:
    status = reply.status or 0
    for problem in check_error(status, reply.body, sent.path):
        ledger.fail("error shape", f"{kind}: {problem}", body=sent.body)
    if status == _QUEUE_FULL and "retry-after" not in reply.headers:
        ledger.fail("error shape", f"{kind}: 429 without Retry-After", body=sent.body)
    if status in (_QUEUE_FULL, *allowed):
        ledger.count(kind, str(status))
    else:
        check = "5xx" if status >= 500 else "refused"
        text = f"{kind}: status {status}, {reply.body[:300]!r}"
        _count_or_fail(ledger, kind, check, text, sent, is_excused=is_excused)


def _judge_answer(
    ledger: Ledger,
    kind: str,
    sent: Sent,
    reply: Reply,
    check: Callable[[Reply], str | None] | None,
    *,
    is_excused: bool,
) -> Answer | None:
    try:
        problem = check(reply) if check else None
        answer = read_answer(sent.path, reply) if sent.path in ANSWER_PATHS else []
    except StreamFailedError as error:
        _count_or_fail(ledger, kind, "stream failed", f"{kind}: {error}", sent, is_excused=is_excused)
        return None
    except (ValueError, KeyError, TypeError) as error:
        ledger.fail("answer shape", f"{kind}: {type(error).__name__} {error} in {reply.body[:300]!r}", body=sent.body)
        return None
    if problem:
        ledger.fail("answer", f"{kind}: {problem}", body=sent.body)
    ledger.count(kind, str(_OK))
    return answer


def _count_or_fail(ledger: Ledger, kind: str, check: str, text: str, sent: Sent, *, is_excused: bool) -> None:
    if is_excused:
        ledger.count(kind, f"{check} in a planted fault")
    else:
        ledger.count(kind, check)
        ledger.fail(check, text, body=sent.body)


async def send_reference(references: References, random_: random.Random, address: Address, ledger: Ledger) -> None:
    """One of the fixed set, compared with the answer computed alone."""
    number = random_.randrange(len(references.scenarios))
    answer = await _ask(references.scenarios[number], address, ledger, is_streamed=random_.random() < 0.6)
    if answer is not None:
        references.compare(number, answer, ledger)


async def send_new(references: References, random_: random.Random, address: Address, ledger: Ledger) -> None:
    """A request that was never sent before; some are computed again alone later."""
    scenario = draw(random_)
    answer = await _ask(scenario, address, ledger, is_streamed=random_.random() < 0.6)
    if answer is not None:
        references.keep(scenario, answer)


async def send_aborted(random_: random.Random, address: Address, ledger: Ledger) -> None:
    """The client leaves before the first byte, or in mid-stream."""
    scenario = draw(random_)
    body = scenario.encoded(is_streamed=random_.random() < 0.8)
    if random_.random() < 0.5:
        sent = Sent(scenario.path, body, abort_before_s=random_.random() * 0.3)
    else:
        sent = Sent(scenario.path, body, abort_after_events=random_.randint(1, 12))
    judge(ledger, f"{scenario.kind} (leaving)", sent, await call(address, sent))


async def send_flood(references: References, random_: random.Random, address: Address, ledger: Ledger) -> None:
    """More requests at once than slots and queue hold: each is answered, and answered right, or told to come back."""

    async def one(number: int) -> None:
        sent = Sent(references.scenarios[number].path, references.scenarios[number].encoded(is_streamed=False))
        answer = judge(ledger, "flood", sent, await call(address, sent))
        if answer is not None:
            references.compare(number, answer, ledger)

    await asyncio.gather(*(one(random_.randrange(len(references.scenarios))) for _ in range(50)))
