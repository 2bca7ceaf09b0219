"""Where decoding cuts a sequence's tokens into pieces, one program a piece; the numbers are in `spec.pieces`.

The cuts are a function of the position alone, so a row's arithmetic is a function of what it sees. Pieces grow because
a short context needs many programs to fill a GPU (of 132 or of 48 processors, with two KV heads), each with few tokens
to read one after the other, while at a long one a piece's float32 sums, 1 KB a query head, must stay small beside the
bytes it read: 4-bit keys and values of 512 tokens are 130 KB for 16 query heads.
"""

import triton
import triton.language as tl

from onebox.spec import pieces

__all__ = ["count_pieces", "piece_bounds"]

FIRST_PIECE = tl.constexpr(pieces.FIRST_PIECE)
SAME_PIECES = tl.constexpr(pieces.SAME_PIECES)
SPAN = tl.constexpr(pieces.FIRST_PIECE * pieces.SAME_PIECES)  # tokens in the pieces of the first length


@triton.jit
def piece_bounds(piece, DOUBLINGS: tl.constexpr):
    """The first token of a piece and the first one after it."""
    level = tl.minimum(piece // SAME_PIECES, DOUBLINGS)
    length = FIRST_PIECE << level
    start = ((1 << level) - 1) * SPAN + (piece - level * SAME_PIECES) * length
    return start, start + length


@triton.jit
def count_pieces(tokens, DOUBLINGS: tl.constexpr):
    """How many pieces hold the first `tokens` tokens."""
    level = 0
    for doubling in tl.static_range(DOUBLINGS):
        level += (tokens > ((2 << doubling) - 1) * SPAN).to(tl.int32)
    rest = tl.maximum(tokens - ((1 << level) - 1) * SPAN, 0)
    length = FIRST_PIECE << level
    return level * SAME_PIECES + (rest + length - 1) // length
