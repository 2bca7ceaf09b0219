"""The latest reading for a server's metrics: read by a thread of its own, and only while somebody asks."""

import threading
import time
from collections.abc import Callable

from onebox.sensors.reading import SensorReading, Sensors

__all__ = ["SensorWatch"]

_INTERVAL_S = 5.0
_IDLE_S = 60.0
"""Without a question for this long, the thread ends."""
_FIRST_S = 2.0
"""The first question waits this long for a reading."""


class SensorWatch:
    """One reading every few seconds, however often it is asked for; none while nobody asks."""

    def __init__(self, read: Callable[[], SensorReading] | None = None, interval_s: float = _INTERVAL_S) -> None:
        self._read = read or Sensors().read
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._latest: SensorReading | None = None
        self._has_read = threading.Event()

    def latest(self) -> SensorReading | None:
        """The last reading; None if there is none that is recent. Waits only for the first: not for an event loop."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._thread is None:
                self._has_read.clear()
                self._thread = threading.Thread(target=self._keep_reading, name="sensors", daemon=True)
                self._thread.start()
        self._has_read.wait(_FIRST_S)
        found = self._latest
        is_recent = found is not None and time.perf_counter() - found.at_s < 3 * self._interval_s + _FIRST_S
        return found if is_recent else None

    def _keep_reading(self) -> None:
        try:
            while True:
                self._latest = self._read()
                self._has_read.set()
                time.sleep(self._interval_s)
                with self._lock:
                    if time.monotonic() - self._asked_at > _IDLE_S:
                        return
        finally:
            # Also after an error, so that the next question starts it again.
            self._thread = None
