"""Deliveries: no figure depends on how the server cuts its tokens into events and its events into packets."""

import asyncio
import json
import random
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.bench import client
from onebox.bench.answer import Ask, StreamedAnswer
from onebox.bench.client import Client, Connection
from onebox.bench.figures import figures, speed_notes
from onebox.bench.record import RequestRecord, Role, WorkloadKind, WorkloadRecord
from onebox.bench.timing import batch_tok_s, decode_tok_s, deliveries, gaps_s, token_times, tokens_after_first

MESSAGE = {"role": "user", "content": "Hello"}


def record(arrivals, tokens, **changes):
    made = RequestRecord(
        Role.LOAD, 0.0, arrivals[-1] + 0.01, tuple(arrivals), tuple(tokens), 64, sum(tokens), "usage", responded_s=0.1
    )
    return replace(made, **changes)


def loaded(kind, *requests):
    settings = {"prompt": 64, "answer": 9, "depth": 0, "concurrency": 1}
    return figures(WorkloadRecord("x", kind, settings, requests, 9.0))


STEPS = st.lists(st.tuples(st.floats(0.002, 0.5), st.integers(1, 5)), min_size=3, max_size=30)


@given(STEPS, st.booleans(), st.randoms(use_true_random=False))
def test_the_same_steps_in_other_events_give_the_same_figures(steps, with_ids, draw):
    """Each step is one write: as one event, as an event for each token, or cut anywhere between."""
    clock, whole, single, cut = 0.1, ([], []), ([], []), ([], [])
    for gap_s, count in steps:
        clock += gap_s
        parts = [1] * count
        middle = draw.randint(0, count)
        for made, pieces in ((whole, [count]), (single, parts), (cut, filter(None, (middle, count - middle)))):
            for piece in pieces:
                made[0].append(clock)
                made[1].append(piece)
    options = [record(*made) for made in (whole, single, cut)]
    if not with_ids:
        options = [replace(one, arrival_tokens=(), arrival_chars=one.arrival_tokens) for one in options]
    for kind in (WorkloadKind.LOAD, WorkloadKind.SWEEP):
        first, *others = [loaded(kind, one) for one in options]
        for other in others:
            assert other == pytest.approx(first)
    assert len(gaps_s(options[1])) == len(steps) - 1
    assert min(gaps_s(options[1])) >= 0.001


def test_packets_of_one_write_are_one_delivery():
    request = record([0.5, 0.5004, 0.5009, 0.52, 0.5203, 0.54], [1, 1, 1, 2, 2, 3])
    assert [(round(one.at_s, 3), one.tokens) for one in deliveries(request)] == [(0.5, 3), (0.52, 4), (0.54, 3)]
    assert tokens_after_first(request) == 7
    assert decode_tok_s(request) == pytest.approx(7 / 0.04)


def test_six_tokens_in_one_burst_have_no_speed_and_that_is_said():
    burst = record([0.5, 0.50005, 0.5001, 0.5002, 0.50027, 0.50035], [1] * 6)
    assert decode_tok_s(burst) is None
    assert batch_tok_s([burst, burst]) is None
    # A second delivery is one gap, and three within 20 ms are too near to the time it takes to read them.
    assert decode_tok_s(record([0.5, 0.9], [1, 5])) is None
    assert decode_tok_s(record([0.5, 0.505, 0.51], [2, 2, 2])) is None
    assert decode_tok_s(record([0.5, 0.51, 0.52], [2, 2, 2])) == pytest.approx(200)
    workload = WorkloadRecord("x", WorkloadKind.SINGLE, {}, (burst, replace(burst, role=Role.COLD)), 1.0)
    found = figures(workload)
    assert not [name for name in found if name.startswith("decode")]
    assert found["e2e_p50_tok_s"] == pytest.approx(6 / burst.total_s)
    assert speed_notes(workload) == ["2 of 2 answers are too short to have a decode speed"]


def test_tokens_without_ids_are_shared_out_by_characters():
    request = record([0.5, 0.6, 0.7], [4, 3, 3], arrival_tokens=(), arrival_chars=(20, 15, 15))
    assert tokens_after_first(request) == pytest.approx(6)
    assert decode_tok_s(request) == pytest.approx(30)
    assert token_times(request) == pytest.approx([0.5 + 0.2 * place / 9 for place in range(10)])


@pytest.fixture
def served(monkeypatch):
    """Serves one answer over a real socket, each write in pieces, and gives the record.

    The client's clock is a second later for each write, which comes once the client has taken the write before.
    """
    now_s, taken = [0.0], threading.Semaphore(0)
    take = StreamedAnswer.take

    def take_and_tell(*given):
        take(*given)
        taken.release()

    monkeypatch.setattr(StreamedAnswer, "take", take_and_tell)
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    return partial(_serve_and_ask, now_s, taken)


def _serve_and_ask(now_s, taken, writes):
    while taken.acquire(blocking=False):
        # The end of the answer before.
        pass
    chunk = {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None, "token_ids": [7]}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": sum(len(write) for write in writes)}}

    def serve(listener):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            asked = b""
            while not asked.endswith(b"}"):
                asked += connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
            for write in writes:
                now_s[0] += 1.0
                data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for _ in write)
                for begin, end in zip([0, *write[1:]], [*write[1:], len(data)], strict=True):
                    connection.sendall(data[begin:end])
                for _ in write:
                    taken.acquire(timeout=60)
            ending = [json.dumps(last), json.dumps(usage), "[DONE]"]
            connection.sendall("".join(f"data: {text}\n\n" for text in ending).encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()

        async def run():
            async with Client(Connection(f"http://127.0.0.1:{listener.getsockname()[1]}")) as asking:
                return await asking.ask(Ask((MESSAGE,), max_tokens=64))

        answer = asyncio.run(run())
        thread.join(10)
    assert answer.failure is None, answer.failure
    return answer.recorded(Role.LOAD, answer.sent_at)


def test_three_events_in_one_write_are_one_delivery_over_a_socket(served):
    """Each write has three tokens; sent whole, or cut in the middle of an event."""
    for cuts in ((0, 100, 200), (0, 1, 300)):
        request = served([cuts] * 5)
        assert request.completion_tokens == 15
        assert [delivery.tokens for delivery in deliveries(request)] == [3] * 5
        assert gaps_s(request) == [1.0] * 4


def test_http_chunks_of_one_read_share_its_time():
    draw = random.Random(3)
    body = b"".join(b"data: %d\n\n" % number for number in range(40))
    pieces, place = [], 0
    while place < len(body):
        size = draw.randint(1, 9)
        pieces.append(b"%x\r\n%s\r\n" % (len(body[place : place + size]), body[place : place + size]))
        place += size

    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            time.sleep(0.05)
            connection.sendall(b"".join(pieces) + b"0\r\n\r\n")

    async def run(port):
        import httpx

        from onebox.bench.client import _events

        async with httpx.AsyncClient() as http, http.stream("GET", f"http://127.0.0.1:{port}/") as response:
            return [(data, at) async for data, at in _events(response)]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        found = asyncio.run(run(listener.getsockname()[1]))
        thread.join(10)
    assert [data for data, _ in found] == [str(number) for number in range(40)]
    # One write of some hundred bytes is one segment, so one read.
    assert len({at for _, at in found}) == 1
