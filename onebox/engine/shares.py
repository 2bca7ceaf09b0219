"""Clients' shares of the slots: nobody fills them all while another client waits.

A client alone may run in every slot. When others wait, those within their shares go first, and what runs beyond its
client's share is preempted for them; priorities come before shares.
"""

import math
from collections.abc import Collection
from collections.abc import Sequence as Ordered

from onebox.engine.request import ClientShare
from onebox.engine.sequence import Sequence

__all__ = ["beyond_shares", "next_in_queue"]


def next_in_queue(waiting: Ordered[Sequence], running: Collection[Sequence]) -> Sequence | None:
    """The first that waits; where its client's share is used up, the first of that priority whose client's is not."""
    if not waiting:
        return None
    head = waiting[0]
    if _num_left(head.request.client, running) > 0:
        return head
    alike = (one for one in waiting if one.request.priority == head.request.priority)
    return next((one for one in alike if _num_left(one.request.client, running) > 0), head)


def beyond_shares(sequence: Sequence, running: Collection[Sequence]) -> list[Sequence]:
    """Those that may be preempted for this one: they run beyond their clients' shares, and it would not.

    In the order in which they are given; of each client no more than are beyond its share.
    """
    if _num_left(sequence.request.client, running) <= 0:
        return []
    num_beyond: dict[str, float] = {}
    found = []
    for other in running:
        client = other.request.client
        if client is None or other.request.priority != sequence.request.priority:
            continue
        num_beyond.setdefault(client.name, -_num_left(client, running))
        if num_beyond[client.name] > 0:
            num_beyond[client.name] -= 1
            found.append(other)
    return found


def _num_left(client: ClientShare | None, running: Collection[Sequence]) -> float:
    """Slots of its share that the client does not hold; below 0 where it holds more."""
    if client is None or client.max_slots is None:
        return math.inf
    return client.max_slots - sum(
        bool(one.request.client and one.request.client.name == client.name) for one in running
    )
