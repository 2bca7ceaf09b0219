"""The process that decodes clients' images and videos: `python -m onebox.text.decoder`.

It reads requests from its standard input and writes replies to its standard output, both a line of JSON followed by as
many bytes as its `num_bytes` says. A reply contains numbers and text alone, so that a decoder that was taken over gets
no further. Its memory is limited, and each request has a time limit after which the process ends; another one is then
started for the next file.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from onebox.spec.errors import OneboxError, UnsupportedError
from onebox.text.images import Resize, open_clip, open_image

__all__ = ["receive", "send"]

MAX_MEMORY_BYTES = 3 << 29
"""Of address space beyond that of the started process: 1.5 GiB. The largest image takes half of it."""


def send(pipe: IO[bytes], head: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
    pipe.write(json.dumps({**head, "num_bytes": len(data)}).encode() + b"\n")
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """The next request or reply; EOFError if there will be none."""
    line = pipe.readline()
    head = json.loads(line) if line.endswith(b"\n") else {}
    data = pipe.read(head.get("num_bytes", 0))
    if not head or len(data) < head["num_bytes"]:
        raise EOFError
    return head, data


def _main() -> None:
    _limit_itself()
    # Anything else that is printed must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request, data = receive(sys.stdin.buffer)
        except EOFError:
            return
        # Without a handler: it ends the process, whatever it does.
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        reply, pixels = _answer(request, data)
        signal.setitimer(signal.ITIMER_REAL, 0)
        del data
        send(replies, reply, b"" if pixels is None else pixels.data.cast("B"))
        del pixels
        _return_freed_memory()


def _limit_itself() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY_BYTES, size + MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Answers go before pictures.
    os.nice(5)


def _return_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], NDArray[np.uint8] | None]:
    try:
        return _opened(request, data) if request["resize"] is None else _read(request, data)
    except OneboxError as error:
        return {"error": str(error), "is_unsupported": isinstance(error, UnsupportedError)}, None
    except MemoryError:
        return {"error": "It takes too much memory to decode; send a smaller one.", "is_unsupported": False}, None


def _opened(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], None]:
    if request["kind"] == "image":
        still = open_image(data)
        return {"height": still.height, "width": still.width}, None
    clip = open_clip(data)
    sizes = {"height": clip.height, "width": clip.width}
    return {"num_frames": clip.num_frames, "fps": clip.fps, **sizes}, None


def _read(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    resize = Resize(*request["resize"])
    if request["kind"] == "image":
        pixels = open_image(data).read(resize)
    else:
        pixels = open_clip(data).read(request["places"], resize)
    return {"shape": pixels.shape}, pixels


if __name__ == "__main__":
    _main()
