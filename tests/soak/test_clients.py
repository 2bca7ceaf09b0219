"""The soak's judgement of replies: wrong answers, unnamed errors and lost requests are found."""

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager

import pytest

from benchmarks.soak.answers import StreamFailedError, read_answer
from benchmarks.soak.clients import References, judge
from benchmarks.soak.hostile import hostile_requests
from benchmarks.soak.http import Address, Reply, Sent, call
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.malformed import malformed
from benchmarks.soak.scenarios import COMPLETIONS, draw, reference_scenarios
from benchmarks.soak.sockets import Holders

SENT = Sent(COMPLETIONS, b"{}")
CHOICE = {"index": 0, "text": "Hi", "finish_reason": "stop", "token_ids": [7], "logprobs": None}
REFUSAL = json.dumps({"error": {"message": "It is stopping.", "type": "server_error", "code": None, "param": None}})


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path)


def replied(status, body, **fields):
    body = body if isinstance(body, bytes) else body.encode()
    return Reply(1.0, 2.0, status, {"content-type": "application/json"}, body, **fields)


def streamed(*events):
    body = "".join(f"data: {event}\n\n" for event in events)
    return Reply(1.0, 2.0, 200, {"content-type": "text/event-stream"}, body.encode())


def test_an_answer_is_read_and_counted(ledger):
    answer = judge(ledger, "completion", SENT, replied(200, json.dumps({"choices": [CHOICE]})))
    assert answer[0]["text"] == "Hi"
    assert not ledger.failures
    assert ledger.outcomes["completion", "200"] == 1


@pytest.mark.parametrize(
    ("reply", "check"),
    [
        (replied(500, REFUSAL), "5xx"),
        (replied(503, REFUSAL), "5xx"),
        (replied(400, REFUSAL), "refused"),
        (replied(400, "no"), "error shape"),
        (replied(429, REFUSAL), "error shape"),
        (replied(200, "{}"), "answer shape"),
        (replied(None, "", problem="cut off"), "no answer"),
        (streamed('{"error": {"message": "The engine died."}}'), "stream failed"),
        (streamed('{"choices": [{"index": 0, "text": "H"}]}', "[DONE]"), "stream failed"),
    ],
    ids=["500", "503", "400", "no JSON", "429 without Retry-After", "no answer in it", "cut off", "error", "no end"],
)
def test_what_is_neither_an_answer_nor_a_named_error_is_found(ledger, reply, check):
    judge(ledger, "completion", SENT, reply)
    assert ledger.num_failures[check] == 1


def test_errors_are_excused_while_a_planted_fault_is_active_and_not_after(ledger):
    window = ledger.open_window("engine killed", "errors")
    window.began, window.ended = 1.5, 1.8
    judge(ledger, "completion", SENT, replied(503, REFUSAL))
    assert not ledger.failures
    late = replied(503, REFUSAL)
    late.began, late.ended = 30.0, 31.0
    judge(ledger, "completion", SENT, late)
    assert ledger.num_failures["5xx"] == 1


def test_a_server_that_is_gone_is_one_failure_and_not_one_of_every_client(ledger):
    ledger.is_server_gone = lambda: True
    judge(ledger, "completion", SENT, replied(None, "", problem="cut off"))
    assert not ledger.failures


def test_what_must_be_refused_may_not_be_answered(ledger):
    judge(ledger, "completion", SENT, replied(200, json.dumps({"choices": [CHOICE]})), frozenset({400}))
    assert ledger.num_failures["accepted"] == 1


def test_an_answer_that_differs_in_one_bit_is_wrong(ledger):
    references = References(scenarios=[draw(random.Random(1))])
    first = [{"text": "Hi", "logprobs": [-0.25]}]
    references.compare(0, first, ledger)
    references.compare(0, [{"text": "Hi", "logprobs": [-0.25]}], ledger)
    assert (ledger.num_compared, len(ledger.failures)) == (2, 0)
    references.compare(0, [{"text": "Hi", "logprobs": [-0.25000000000000006]}], ledger)
    assert ledger.num_failures["wrong answer"] == 1


def test_a_stream_reads_as_the_whole_answer():
    pieces = [{"index": 0, "text": "H", "token_ids": [7]}, {"index": 0, "text": "i", "finish_reason": "stop"}]
    whole = read_answer(COMPLETIONS, replied(200, json.dumps({"choices": [CHOICE]})))
    stream = streamed(*(json.dumps({"choices": [piece]}) for piece in pieces), "[DONE]")
    assert read_answer(COMPLETIONS, stream) == whole
    with pytest.raises(StreamFailedError):
        read_answer(COMPLETIONS, streamed("[DONE]"))


def test_the_same_seed_gives_the_same_requests():
    assert reference_scenarios() == reference_scenarios()
    assert [draw(random.Random(3)) for _ in range(5)] == [draw(random.Random(3)) for _ in range(5)]
    assert malformed(random.Random(4)) == malformed(random.Random(4))


def test_hostile_requests_cover_every_class_within_a_round():
    requests = hostile_requests(random.Random(5), Address("127.0.0.1", 1, "key"))
    missing = {"grammar", "number", "size", "depth", "text", "image", "access", "malformed"}
    for _ in range(300):
        missing.discard(next(requests).kind.split(":")[0])
        if not missing:
            return
    assert not missing


@asynccontextmanager
async def misbehaving(raw, *, stays=False):
    """A server that answers every connection with these bytes, and then closes it or stays silent."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        if stays:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Address(*server.sockets[0].getsockname())


@pytest.mark.parametrize(
    ("raw", "stays", "problem"),
    [
        (b"", False, "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", False, "cut off"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", False, "cut off"),
        (b"HTTP/1.1 200 OK\r\n", True, "no end within 1 s"),
        (b"nonsense\r\n\r\n", False, "IndexError: list index out of range"),
    ],
)
def test_a_reply_without_an_end_says_so(raw, stays, problem):
    async def ask():
        async with misbehaving(raw, stays=stays) as address:
            return await call(address, Sent("/", b"{}", limit_s=1.0))

    reply = asyncio.run(ask())
    assert reply.status is None
    assert reply.problem == problem


def test_at_a_quiet_point_no_client_holds_an_unread_answer(ledger):
    """Young ones leave; the server has to drop the others."""

    async def end() -> list[bool]:
        holders, dropped = Holders(ledger), asyncio.Event()
        young, old = (asyncio.ensure_future(wait()) for wait in (asyncio.Event().wait, dropped.wait))
        holders._unread = {young: time.monotonic(), old: time.monotonic() - 40}
        ending = asyncio.ensure_future(holders.end_unread())
        done, _ = await asyncio.wait([ending], timeout=0.1)
        dropped.set()
        await asyncio.wait_for(ending, 20)
        return [bool(done), young.cancelled(), old.done() and not old.cancelled()]

    assert asyncio.run(end()) == [False, True, True]
