"""How long to wait before a request is sent again, and when to give up."""

import threading
from collections.abc import Callable

from onebox.checkpoint.hub_errors import retry_after_s

__all__ = ["Retries"]

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 16.0
MAX_RETRIES = 5
MAX_RETRY_AFTER_S = 120.0
"""A server that asks for a longer wait is not waited for."""


class Retries:
    """The waits of one request: twice as long each time, or as long as the server asks."""

    def __init__(self, stop: threading.Event | None = None, on_wait: Callable[[str], None] = lambda _: None) -> None:
        self._stop = stop or threading.Event()
        self._on_wait = on_wait
        self._done = 0

    def reset(self) -> None:
        """Counts from the start again: the last attempt made progress."""
        self._done = 0

    def wait(self, error: BaseException) -> bool:
        """Waits before the next attempt after `error`; False if there should be none."""
        if self._stop.is_set():
            return False  # the error may well come from stopping: nothing is said of it
        asked = retry_after_s(error)
        if self._done >= MAX_RETRIES or (asked or 0.0) > MAX_RETRY_AFTER_S:
            return False
        delay = asked if asked is not None else min(MAX_DELAY_S, FIRST_DELAY_S * 2**self._done)
        self._done += 1
        response = getattr(error, "response", None)
        why = f"the hub answers {response.status_code}" if response is not None else f"{error or type(error).__name__}"
        self._on_wait(f"{why}: trying again in {delay:.0f} s")
        return not self._stop.wait(delay)
