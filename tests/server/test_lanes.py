"""Text work has threads of its own: small does not wait for large, and what waits is bounded."""

import asyncio
import threading

import pytest

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
