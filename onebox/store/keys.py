"""The key of a prefix: a digest of its tokens, page by page. Only keys are written to disk, never token ids."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from onebox.spec.kv import PAGE_TOKENS

__all__ = ["KEY_BYTES", "prefix_keys"]

KEY_BYTES = 20
_TOKEN_BYTES = 8


def prefix_keys(tokens: Sequence[int]) -> list[bytes]:
    """One key for each whole page: that of all tokens up to the page's end.

    A key is the blake2b of the key before it and the page's ids (int64, little-endian); the first has no key before it.
    """
    ids = array("q", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    pages = memoryview(ids).cast("B")
    step = PAGE_TOKENS * _TOKEN_BYTES
    keys: list[bytes] = []
    key = b""
    for begin in range(0, len(pages) - step + 1, step):
        digest = blake2b(key, digest_size=KEY_BYTES)
        digest.update(pages[begin : begin + step])
        key = digest.digest()
        keys.append(key)
    return keys
