"""Text work has threads of its own: small does not wait for large, and what waits is bounded."""

import asyncio
import threading

import pytest

from onebox.engine.api import QueueFullError
from onebox.server import lanes as module
from onebox.server.lanes import TextLanes, is_small


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a" * 1000, True),
        ("a" * 100_000, False),
        ([{"content": "a" * 40_000}] * 2, False),
        ([1] * 100_000, False),
        ({str(n): None for n in range(100_000)}, False),
        ([[[[]]] * 100], True),
        (None, True),
    ],
)
def test_the_size_of_what_a_client_sent(value, expected):
    assert is_small(value) is expected


def test_small_work_does_not_wait_for_large():
    gate = threading.Event()

    async def use():
        lanes = TextLanes()
        large = [asyncio.ensure_future(lanes.run(gate.wait, is_small=False)) for _ in range(10)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(lanes.run(lambda: 5, is_small=True), 20) == 5
        gate.set()
        assert await asyncio.wait_for(asyncio.gather(*large), 20) == [True] * 10

    asyncio.run(use())


def test_what_waits_is_bounded_and_what_nobody_awaits_is_not_begun(monkeypatch):
    monkeypatch.setattr(module, "_MAX_WAITING", {"small": 3, "large": 3})
    gate, begun = threading.Event(), []

    async def use():
        lanes = TextLanes()
        blocking = [asyncio.ensure_future(lanes.run(gate.wait, is_small=False)) for _ in range(2)]
        while lanes._lanes["large"]._waiting.qsize() or not all(not task.done() for task in blocking):
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(lanes.run(lambda: begun.append(1), is_small=False)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 large prompts already wait"):
            await lanes.run(gate.wait, is_small=False)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        gate.set()
        await asyncio.wait_for(asyncio.gather(*blocking), 20)
        assert await asyncio.wait_for(lanes.run(lambda: 5, is_small=False), 20) == 5

    asyncio.run(use())
    assert begun == []


def test_an_error_is_the_requests_own():
    async def use():
        lanes = TextLanes()
        with pytest.raises(ZeroDivisionError):
            await lanes.run(lambda: 1 // 0, is_small=True)
        assert await lanes.run(lambda: 5, is_small=True) == 5

    asyncio.run(use())
