"""Whose turn it is: where several clients share the queue, none waits for all that another one has queued.

A request's turn is the one after its client's last, or the one that is being served, if that is later. So a client with
one request goes before the second of one with forty, nobody's request waits for ever, and the requests of one client
stay in their order.
"""

from onebox.engine.request import ClientShare

__all__ = ["QueueTurns"]

_MOST_CLIENTS = 1024
"""Whose last turns are kept, and more only while they wait: addresses come and go."""


class QueueTurns:
    """Gives out turns; the lower one goes first."""

    def __init__(self) -> None:
        self._now = 0
        """The latest turn that was served."""
        self._last: dict[str, int] = {}
        """By client."""

    def give(self, client: ClientShare | None) -> int:
        """Requests without a client are those of one."""
        name = client.name if client else ""
        if len(self._last) >= _MOST_CLIENTS:
            # Who has nothing ahead begins anew with the present turn: at worst once more in it.
            self._last = {other: turn for other, turn in self._last.items() if turn > self._now}
        turn = self._last[name] = max(self._now, self._last.get(name, 0) + 1)
        return turn

    def serve(self, turn: int) -> None:
        self._now = max(self._now, turn)
