"""Where tokens' keys and values are kept."""

from torch import Tensor

from onebox.kernels.dispatch import implementation

__all__ = ["kv_slots"]


def kv_slots(page_table: Tensor, sequences: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """int64 [n]: the slots of the tokens at `positions` of `sequences`, both int64 [n], by page_table int32 [S, pages].

    -1 for a token of no sequence (S or more), or beyond the table.
    """
    slots: Tensor = implementation(__name__, page_table).kv_slots(page_table, sequences, positions, page_tokens)
    return slots
