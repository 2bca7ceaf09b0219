"""What a cached prefix takes on disk, and how long it takes to read it back, against computing it again."""

from collections.abc import Sequence
from typing import NamedTuple

from onebox.planner.memory import MemoryRequest, page_bytes, state_bytes
from onebox.planner.prompts import NEW_TOKENS, PromptTimes
from onebox.spec.model import ModelSpec

__all__ = ["DISK_BYTES_PER_SECOND", "PrefixOnDisk", "prefixes_on_disk"]

DISK_BYTES_PER_SECOND = 5e9
"""An NVMe disk's reading, assumed. A Spark's was measured at 6.9 GB/s, by others; the server measures its own."""


class PrefixOnDisk(NamedTuple):
    """The prefix of a prompt, all but its last NEW_TOKENS, in whole pages."""

    num_tokens: int
    num_bytes: int
    """KV pages and one state; files have up to 8 KiB more for each 16 pages."""
    read_seconds: float
    first_token_seconds: float
    """Of the prompt, the rest of it computed."""


def prefixes_on_disk(
    spec: ModelSpec,
    request: MemoryRequest,
    prompts: Sequence[PromptTimes],
    bytes_per_second: float = DISK_BYTES_PER_SECOND,
) -> tuple[PrefixOnDisk, ...]:
    """One for each prompt that is longer than NEW_TOKENS."""
    found = []
    for times in prompts:
        num_pages = (times.num_tokens - NEW_TOKENS) // request.page_tokens
        if num_pages > 0:
            num_bytes = num_pages * page_bytes(spec, request) + state_bytes(spec, request)
            seconds = num_bytes / bytes_per_second
            found.append(
                PrefixOnDisk(num_pages * request.page_tokens, num_bytes, seconds, seconds + times.cached_seconds)
            )
    return tuple(found)
