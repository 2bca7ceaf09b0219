"""Into how many pieces attention cuts a context when it decodes: each is computed on its own and leaves float32 sums.

    tokens     0 ... 8,192      ... 24,576     ... 57,344     ...
    pieces     64 of 128        64 of 256      64 of 512      of 1,024 each

A piece's length doubles as often as its KV format says, here three times. What a piece is computed for, and why they
grow, is told where they are computed. Stdlib only.
"""

from onebox.spec.kv import KVFormat

__all__ = ["FIRST_PIECE", "SAME_PIECES", "doublings", "piece_count"]

FIRST_PIECE = 128
"""Tokens in each of the first pieces."""
SAME_PIECES = 64
"""Pieces of one length, before the length doubles."""
_SPAN = FIRST_PIECE * SAME_PIECES


def doublings(kv: KVFormat) -> int:
    """How often the length of pieces doubles: decoding codes wants more programs at a time than reading bytes does."""
    return 2 if min(kv.key_bits, kv.value_bits) < 8 else 3


def piece_count(tokens: int, times: int) -> int:
    """How many pieces hold the first `tokens` tokens where the length doubles so many times."""
    level = sum(tokens > ((2 << doubling) - 1) * _SPAN for doubling in range(times))
    rest = tokens - ((1 << level) - 1) * _SPAN
    return level * SAME_PIECES + -(-rest // (FIRST_PIECE << level))
