"""How fast this engine computes prompts and reads prefixes, as measured: a hit must never be worse than a miss."""

import threading
from collections.abc import Mapping

__all__ = ["DiskRates"]

_READ_LATENCY_S = 0.004
"""Of a load, whatever its size: threads that are woken, files that are opened."""
_DEFAULT_READ_BYTES_PER_S = 5e8
"""Before anything was read: any disk that is worth it is faster."""
_LEAST_READ_BYTES = 1 << 20
"""A smaller read says nothing about the disk's speed."""
_WINDOW_TOKENS = 16_384.0
"""The speed of computing is that of about so many of the latest tokens."""
_READ_WEIGHT = 0.3
"""Of the latest read in the speed of reading."""
_HOPE = 1.1
"""A disk that was found slow is taken to be so much faster after every window of tokens that was computed, up to the
default, so that it gets another chance."""


class DiskRates:
    """Both speeds. Any thread may call; `saved` carries them from one start to the next."""

    def __init__(self, saved: Mapping[str, float] | None = None) -> None:
        self._lock = threading.Lock()
        self._tokens = self._seconds = 0.0
        saved = saved or {}
        self._read_bytes_per_s = saved.get("read_bytes_per_s", _DEFAULT_READ_BYTES_PER_S)
        if saved.get("prefill_tokens_per_s"):
            self._tokens, self._seconds = _WINDOW_TOKENS, _WINDOW_TOKENS / saved["prefill_tokens_per_s"]

    @property
    def saved(self) -> dict[str, float]:
        """What was measured, for the next start."""
        with self._lock:
            rates = {"read_bytes_per_s": self._read_bytes_per_s}
            if self._seconds > 0:
                rates["prefill_tokens_per_s"] = self._tokens / self._seconds
            return rates

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        with self._lock:
            kept = max(0.0, 1 - num_tokens / _WINDOW_TOKENS) if self._tokens >= _WINDOW_TOKENS else 1.0
            self._tokens = self._tokens * kept + num_tokens
            self._seconds = self._seconds * kept + seconds
            if self._read_bytes_per_s < _DEFAULT_READ_BYTES_PER_S:
                self._read_bytes_per_s *= _HOPE ** (num_tokens / _WINDOW_TOKENS)

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        if num_bytes < _LEAST_READ_BYTES:
            return
        rate = num_bytes / max(seconds - _READ_LATENCY_S, 1e-6)
        with self._lock:
            self._read_bytes_per_s += _READ_WEIGHT * (rate - self._read_bytes_per_s)

    def compute_seconds(self, num_tokens: int) -> float | None:
        """None where nothing was computed yet."""
        with self._lock:
            return num_tokens * self._seconds / self._tokens if self._tokens else None

    def read_pays(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether reading beats computing; yes where nothing was computed yet."""
        compute = self.compute_seconds(num_tokens)
        if compute is None:
            return True
        with self._lock:
            return _READ_LATENCY_S + num_bytes / self._read_bytes_per_s < compute
