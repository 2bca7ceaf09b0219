"""Work that clients shape has threads of its own, and what waits for them is bounded."""

import asyncio
import threading

import pytest

from onebox.server.errors import ServerBusyError
from onebox.server.pool import WorkPool


def test_what_waits_is_bounded_and_what_nobody_awaits_is_not_begun():
    gate, begun = threading.Event(), []

    async def use():
        pool, busy = WorkPool("a test", num_threads=2, max_waiting=3), threading.Barrier(3)
        blocking = [asyncio.ensure_future(pool.run(lambda: (busy.wait() and gate.wait()) or 5)) for _ in range(2)]
        await asyncio.to_thread(busy.wait)
        waiting = [asyncio.ensure_future(pool.run(begun.append, 1)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # Nobody awaits it any more, but its arguments are held until a thread comes to it.
        with pytest.raises(ServerBusyError, match="wait for a test"):
            await pool.run(begun.append, 2)
        gate.set()
        await asyncio.wait_for(asyncio.gather(*blocking), 20)
        assert await asyncio.wait_for(pool.run(lambda: 5), 20) == 5

    asyncio.run(use())
    assert begun == []


def test_an_error_is_the_callers_own():
    async def use():
        pool = WorkPool("a test", num_threads=1, max_waiting=1)
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert await pool.run(lambda: 5) == 5

    asyncio.run(use())
