"""The number of pieces into which decode attention splits a context. Each is computed separately, with float32 sums.

    tokens     0 ... 8,192      ... 24,576     ... 57,344     ...
    pieces     64 of 128        64 of 256      64 of 512      of 1,024 each

How often the length of a piece doubles depends on the KV format; the table shows three times. The attention kernels
describe how pieces are computed and why they grow. Stdlib only.
"""

from onebox.spec.kv import KVFormat

__all__ = ["BLOCK_DOUBLINGS", "DIRECT_TOKENS", "FIRST_PIECE", "SAME_PIECES", "SLICE_TOKENS", "doublings", "piece_count"]

FIRST_PIECE = 128
"""Tokens in each of the first pieces."""
SAME_PIECES = 64
"""Pieces of one length, before the length doubles."""
DIRECT_TOKENS = 1024
"""So many new tokens of a prefill read packed KV themselves: captured prefills, whose page tables are always full."""
SLICE_TOKENS = 65_536
"""Tokens of packed KV that a longer prefill decodes at a time, those of all its sequences together."""
BLOCK_DOUBLINGS = 3
"""How often the piece length doubles in a block drafter's attention, whose pages are not packed."""
_SPAN = FIRST_PIECE * SAME_PIECES


def doublings(kv: KVFormat) -> int:
    """How often the piece length doubles: once less for packed KV, where decoding needs more programs in flight."""
    return 2 if min(kv.key_bits, kv.value_bits) <= 8 else 3


def piece_count(tokens: int, times: int) -> int:
    """The number of pieces that cover the first `tokens` tokens if the length doubles `times` times."""
    level = sum(tokens > ((2 << doubling) - 1) * _SPAN for doubling in range(times))
    rest = tokens - ((1 << level) - 1) * _SPAN
    return level * SAME_PIECES + -(-rest // (FIRST_PIECE << level))
