"""Where decode attention cuts a sequence's tokens into pieces, one program per piece; the numbers are in `spec.pieces`.

The cuts depend on the position alone, so a row's arithmetic depends only on the tokens visible to it. Pieces grow with
the position: a short context needs many programs to fill a GPU (132 or 48 multiprocessors, two KV heads), each with few
tokens to load one after another; at a long context a piece's float32 sums, 1 KB per query head, must stay small beside
the bytes it loads: 4-bit keys and values of 512 tokens are 130 KB for 16 query heads.
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
    """(first token of a piece, first token after it)."""
    level = tl.minimum(piece // SAME_PIECES, DOUBLINGS)
    length = FIRST_PIECE << level
    start = ((1 << level) - 1) * SPAN + (piece - level * SAME_PIECES) * length
    return start, start + length


@triton.jit
def count_pieces(tokens, DOUBLINGS: tl.constexpr):
    """Number of pieces that hold the first `tokens` tokens."""
    level = 0
    for doubling in tl.static_range(DOUBLINGS):
        level += (tokens > ((2 << doubling) - 1) * SPAN).to(tl.int32)
    rest = tl.maximum(tokens - ((1 << level) - 1) * SPAN, 0)
    length = FIRST_PIECE << level
    return level * SAME_PIECES + (rest + length - 1) // length
