"""What is removed to make room: the least recently used entries; those of unused families first, pinned ones last."""

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from onebox.store.family import Family

__all__ = ["Tenant", "free_bytes"]


class Tenant(NamedTuple):
    """A family and what this process knows of its use."""

    family: Family
    is_in_use: bool
    """Whether a server uses it."""
    keep: Collection[str] = ()
    """Names of chunks that are being written or reused."""
    is_held: Callable[[bytes], bool] = frozenset[bytes]().__contains__
    """Whether an entry is being read."""


def free_bytes(tenants: Iterable[Tenant], num_bytes: int) -> tuple[int, int]:
    """Removes entries until `num_bytes` are free or none is left; returns (bytes freed, entries removed).

    Call it with the directory's lock held and every family refreshed.
    """
    freed = num_removed = 0
    heap: list[tuple[tuple[bool, bool], float, int, bytes]] = []
    known = list(tenants)
    for index, tenant in enumerate(known):
        for key, record in list(tenant.family.entries.items()):
            rank = (tenant.family.is_pinned(key), tenant.is_in_use)
            heap.append((rank, record.last_used, index, key))
    heapq.heapify(heap)
    while heap and freed < num_bytes:
        rank, last_used, index, key = heapq.heappop(heap)
        family, _, keep, is_held = known[index]
        latest = family.last_used(key)
        if latest is not None and latest > last_used:  # used by another process since this one looked
            heapq.heappush(heap, (rank, latest, index, key))
        elif not is_held(key):
            freed += family.remove(key, keep)
            num_removed += 1
    return freed, num_removed
