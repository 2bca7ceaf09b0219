"""Where a block drafter's context is, and which of it a layer sees."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["BlockContext", "BlockMask", "ContextRows"]


class ContextRows(NamedTuple):
    """Rows of tokens that become context, and their sequences."""

    cu_rows: Tensor
    """int32 [S + 1]: sequence s has the rows cu_rows[s] .. cu_rows[s + 1] - 1."""
    slots: Tensor
    """int32 [S]: the sequence's ring."""
    seen: Tensor
    """int32 [S]: the sequence's tokens, its rows here included: its last row is token seen - 1."""
    slot_mapping: Tensor
    """int64 [R]: the row's place in the pages; negative: the row is not written, neither here nor there."""


class BlockContext(NamedTuple):
    """The context of B blocks."""

    length: Tensor
    """int32 [B]: tokens of the context; the block's first row is the token after them."""
    slots: Tensor
    """int32 [B]: the ring."""
    sequences: Tensor
    """int32 [B]: the row of the page table."""
    page_table: Tensor
    """int32 [S, pages]."""


class BlockMask(NamedTuple):
    """Which keys a row sees, of context and block alike."""

    is_causal: bool
    """No key after the row; otherwise all rows of a block see each other."""
    window: int | None
    """Only keys less than so many positions away. A layer with a window has a ring, one without has pages."""
