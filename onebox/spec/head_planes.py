"""What a decode step reads of an INT8 LM head that is stored in two planes (`onebox.formats.head_planes`)."""

__all__ = ["HIGH_SHARE", "head_read_share"]

HIGH_SHARE = 0.75
"""Of an INT8 head's bytes, those of its high plane: six bits of eight."""

_COMPLETED = 0.025
"""The share of the vocabulary that one row has completed, with top_k 20: 2.1% at the 122B's size by
benchmarks/head_planes.py, and the peaks of the chunks, 0.4%. A greedy row has a quarter of it."""


def head_read_share(num_rows: int) -> float:
    """The share of the head's bytes that a step of so many rows reads, if all are greedy or have a small top_k.

    Rows are taken to complete different tokens, as independent ones do.
    """
    return HIGH_SHARE + (1 - HIGH_SHARE) * (1 - (1 - _COMPLETED) ** num_rows)
