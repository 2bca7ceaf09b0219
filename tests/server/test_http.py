"""The server's event loop: out of descriptors, one line a minute and not one per attempt."""

import asyncio
import errno
import logging
import os

from onebox.server.http import TELL_S, _LoopErrors

MESSAGE = "socket.accept() out of system resource"


class Clock(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self):
        return self.now


def test_attempts_to_accept_without_descriptors_are_one_line_a_minute(caplog):
    caplog.set_level(logging.WARNING)
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    loop, tell = Clock(), _LoopErrors()
    for _ in range(5000):
        loop.now += 2 * TELL_S / 5000
        tell(loop, {"message": MESSAGE, "exception": error})
    loop.close()
    assert [record.getMessage().split(";")[0] for record in caplog.records] == (
        ["new connections wait: Too many open files"] * 2
    )


def test_other_errors_of_the_loop_are_told_in_full(caplog):
    loop = Clock()
    _LoopErrors()(loop, {"message": "Task exception was never retrieved", "exception": ValueError("no")})
    loop.close()
    assert "Task exception was never retrieved" in caplog.text
    assert "ValueError: no" in caplog.text
