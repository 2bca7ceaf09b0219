"""What a decode step reads of an INT8 LM head that is stored in two planes (`onebox.formats.head_planes`)."""

__all__ = ["HIGH_SHARE", "head_read_share", "planes_pay"]

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


_PLANES_S = 70e-6
"""What the planes cost a step beyond their bytes: four launches more and kernels that wait for each other, on an
H200."""


def planes_pay(head_bytes: int, bytes_per_second: float | None) -> bool:
    """Whether a head is faster in two planes; memory whose speed is not known is taken to be slow, as on a GB10.

    An H200 reads the low plane of a 122B's head in less than the planes cost.
    """
    return bytes_per_second is None or (1 - HIGH_SHARE) * head_bytes / bytes_per_second > _PLANES_S
