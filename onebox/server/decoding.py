"""Decoders of images and videos in processes of their own: one that crashes, hangs or runs out of memory costs a file.

Used from threads, each of which has a process for as long as it needs one. Processes that wait are kept.
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onebox.spec.errors import UnsupportedError, UsageError
from onebox.text.decoder import receive, send
from onebox.text.images import Clip, Resize, Still
from onebox.text.patches import MediaKind

__all__ = ["DecoderProcesses"]

HEADER_TIMEOUT_S = 5.0
"""Of an image: the time depends on the file's parts, of which a hostile one has millions, not on its pixels."""
IMAGE_TIMEOUT_S = 20.0
VIDEO_TIMEOUT_S = 120.0

_log = logging.getLogger(__name__)


class DecoderProcesses:
    """Opens files as `onebox.text.images` does."""

    def __init__(self, image_timeout_s: float = IMAGE_TIMEOUT_S, video_timeout_s: float = VIDEO_TIMEOUT_S) -> None:
        self._timeouts_s: dict[MediaKind, float] = {"image": image_timeout_s, "video": video_timeout_s}
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def open_image(self, data: bytes) -> Still:
        header_timeout_s = min(HEADER_TIMEOUT_S, self._timeouts_s["image"])
        found = self._ask("image", data, timeout_s=header_timeout_s)[0]

        def read(resize: Resize) -> NDArray[np.uint8]:
            return _pixels(*self._ask("image", data, resize=resize))

        return Still(found["height"], found["width"], read)

    def open_clip(self, data: bytes) -> Clip:
        found = self._ask("video", data)[0]

        def read(places: Sequence[int], resize: Resize) -> NDArray[np.uint8]:
            return _pixels(*self._ask("video", data, resize=resize, places=list(places)))

        return Clip(found["num_frames"], found["fps"], found["height"], found["width"], read)

    def close(self) -> None:
        """Ends the processes that wait."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _ask(
        self,
        kind: MediaKind,
        data: bytes,
        resize: Resize | None = None,
        places: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """One request to one process; its refusal is raised."""
        timeout_s = timeout_s or self._timeouts_s[kind]
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _started()
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            send(process.stdin, {"kind": kind, "resize": resize, "places": places, "timeout_s": timeout_s}, data)
            reply, pixels = receive(process.stdout)
        except (OSError, EOFError, ValueError):
            raise _refusal(kind, _end(process), timeout_s) from None
        except BaseException:
            _end(process)
            raise
        with self._lock:
            self._idle.append(process)
        if "error" in reply:
            raise (UnsupportedError if reply["is_unsupported"] else UsageError)(reply["error"])
        return reply, pixels


def _pixels(reply: dict[str, Any], data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8).reshape(reply["shape"])


def _started() -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "onebox.text.decoder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # One thread: more take address space, and there are several processes.
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        # Signals of the terminal are for the server.
        process_group=0,
    )


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kills it if it still runs; returns its status, negative for a signal."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        # A request that was not sent completely cannot be flushed.
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    return process.wait()


def _refusal(kind: MediaKind, status: int, timeout_s: float) -> UsageError:
    if status == -signal.SIGALRM:
        return UsageError(f"The {kind} takes more than {timeout_s:g} seconds to decode; send a smaller or shorter one.")
    _log.warning("The decoder of an %s ended with status %d.", kind, status)
    return UsageError(f"The {kind} cannot be decoded: its decoder ended with status {status}; it may be damaged.")
